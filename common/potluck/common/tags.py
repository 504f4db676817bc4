"""Tags of hosts: properties by which an operator chooses machines, such as their site or scanner.

A host declares its tags in its configuration; they do not describe single clients. The coordinator
does not check them: it believes a host that declares a false site.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

from pydantic import Field, StringConstraints

from potluck.common.errors import ProtocolError
from potluck.common.names import Name, is_name

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
            f"host '{host_name}' has {len(tags)} tags; the maximum is {MOST_TAGS}: remove some "
            "from its configuration"
        )
    for name, value in tags.items():
        if not is_name(name) or not 0 < len(value) <= LONGEST_VALUE or not value.isprintable():
            raise ProtocolError(
                f"host '{host_name}' has tag {name[:70]!r} = {value[:70]!r}; names are lower-case "
                f"words, values up to {LONGEST_VALUE} printable characters"
            )
    return dict(tags)
