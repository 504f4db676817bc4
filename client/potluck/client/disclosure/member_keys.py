"""The keys with which a host's clients sign.

`member_key` of the configuration is a key, or a folder with CLIENT.key for each client. A new key
is put into the folder `next` beside it, under the same name. The host uses the new key once the
membership in force names it. So a host that has both keys can sign at all times.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import structlog
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from potluck.common.errors import ConfigurationError
from potluck.common.net.membership import MemberRecord, load_private_key, public_text, troubles_of
from potluck.common.net.membership_in_force import MembershipInForce

# Keys ---------------------------------------------------------------------------------------------

NEXT: Final = "next"


def key_of(path: Path, client: str) -> Ed25519PrivateKey:
    """Read a client's member key: the file itself, or CLIENT.key in the folder.

    Raises ConfigurationError."""
    return load_private_key(_file_of(path, client))


def key_in_force(path: Path, client: str, record: MemberRecord) -> Ed25519PrivateKey:
    """Return the key that a client's record names: its current key or the next one.

    Raises ConfigurationError if the record names neither."""
    file = _file_of(path, client)
    following = file.parent / NEXT / file.name
    for each in (file, following):
        if each == following and not each.exists():
            continue
        key = load_private_key(each)
        if public_text(key) == record.public_key:
            return key
    raise ConfigurationError(
        f"neither {file} nor {following} is the key that the member record of client '{client}' "
        "names; get its key from the operator",
        client=client,
    )


def signing_key(path: Path, client: str, in_force: MembershipInForce | None) -> Ed25519PrivateKey:
    """Return the key that the membership names for a client; the current key if it names none.

    Raises ConfigurationError."""
    members = None if in_force is None else in_force.members
    record = None if members is None else members.records.get(client)
    return key_of(path, client) if record is None else key_in_force(path, client, record)


def _file_of(path: Path, client: str) -> Path:
    return path / f"{client}.key" if path.is_dir() else path


# The watch over the membership --------------------------------------------------------------------

log = structlog.get_logger()

WARNING_SECONDS: Final = 86_400.0
"""Seconds between two warnings about member records that expire."""


async def follow(in_force: MembershipInForce | None, clients: Sequence[str]) -> None:
    """Watch the membership's file, and warn about records that expire, until cancelled.

    in_force: the membership in force; None without a federation root. Returns at once if None.
    """
    if in_force is None:
        return
    watching = asyncio.create_task(in_force.watch())
    try:
        while True:
            for trouble in troubles_of(in_force.members, clients, datetime.now(UTC)):
                log.warning(trouble)
            await asyncio.sleep(WARNING_SECONDS)
    finally:
        watching.cancel()
