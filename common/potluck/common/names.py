"""Names of clients, hosts and runs."""

from __future__ import annotations

import re
from typing import Annotated, NewType

from pydantic import StringConstraints

ClientId = NewType("ClientId", str)

NAME_PATTERN = r"^[a-z0-9][a-z0-9._-]{0,62}$"
Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
"""Id of a client or host: lower-case letters, digits, '.', '_', '-'; at most 63 characters."""


def is_name(text: str) -> bool:
    """Return whether `text` is a valid id of a client or host."""
    return re.fullmatch(NAME_PATTERN, text) is not None
