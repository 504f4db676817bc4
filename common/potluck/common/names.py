"""Names of clients, hosts and runs, and tags of hosts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Final, NewType

from pydantic import Field, StringConstraints

from potluck.common.errors import ProtocolError

# Names --------------------------------------------------------------------------------------------

ClientId = NewType("ClientId", str)

NAME_PATTERN = r"^[a-z0-9][a-z0-9._-]{0,62}$"
Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
"""Id of a client or host: lower-case letters, digits, '.', '_', '-'; at most 63 characters."""


def is_name(text: str) -> bool:
    """Return whether `text` is a valid id of a client or host."""
    return re.fullmatch(NAME_PATTERN, text) is not None


# Tags of hosts ------------------------------------------------------------------------------------
# A host declares its tags in its configuration; they do not describe single clients. The
# coordinator does not check them: it believes a host that declares a false site.

MOST_TAGS: Final = 32
LONGEST_VALUE: Final = 64

TagValue = Annotated[str, StringConstraints(min_length=1, max_length=LONGEST_VALUE)]
"""Value of a tag: printable text."""

Tags = Annotated[dict[Name, TagValue], Field(max_length=MOST_TAGS)]
"""Values of tags by name."""


def check_tags(tags: Mapping[str, str], *, host_name: str) -> dict[str, str]:
    """Return the tags that a host sends. Raises ProtocolError if there are too many, or if a name
    or value is not allowed."""
    if len(tags) > MOST_TAGS:
        raise ProtocolError(
            f"host '{host_name}' has {len(tags)} tags, but at most {MOST_TAGS} are allowed; "
            "remove tags from the host's configuration"
        )
    for name, value in tags.items():
        if not is_name(name) or not 0 < len(value) <= LONGEST_VALUE or not value.isprintable():
            raise ProtocolError(
                f"host '{host_name}' has the tag {name[:70]!r} = {value[:70]!r}; a tag needs a "
                f"name in lower case and a value of at most {LONGEST_VALUE} printable characters"
            )
    return dict(tags)
