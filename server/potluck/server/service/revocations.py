"""Revocations that a running coordinator loads: from a watched file, or from an operator. A revoked
peer is disconnected at once, and refused from then on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import structlog

from potluck.common.errors import PotluckError, StorageError
from potluck.common.net.file_stamp import Stamp, stamp
from potluck.common.net.identity import Credential
from potluck.common.net.key_files import write_whole
from potluck.common.net.revocation import (
    RevocationList,
    Revocations,
    parse_revocations,
    read_revocations,
)

log = structlog.get_logger()

LOOK_SECONDS = 1.0
"""Seconds between looks at the watched file, which cost two system calls."""

KEPT = "revoked.pem"
"""In the state directory, the newest list that an operator has sent."""


class Revoking:
    """The revocations of a coordinator. Lives on the event loop."""

    def __init__(self, state_directory: Path, authority: Path, watched: Path | None) -> None:
        """`watched`: the file of the configuration, if there is one.

        Raises ConfigurationError or IdentityError if a list can't be used: better no coordinator
        than one that admits revoked peers.
        """
        self._authority = authority
        self._kept = state_directory / KEPT
        self._watched = watched
        self._revocations = Revocations()
        self._listeners: list[Callable[[frozenset[int]], None]] = []
        self._number = 0
        self._stamp: Stamp = ()
        if self._kept.exists():
            kept = read_revocations(self._kept, authority)
            self._number = kept.number
            self._take(kept)
        if watched is not None:
            self._stamp = stamp(watched)
            self._take(read_revocations(watched, authority))

    def listen(self, listener: Callable[[frozenset[int]], None]) -> None:
        """Have `listener` called with the serial numbers of every new revocation."""
        self._listeners.append(listener)

    def check(self, credential: Credential) -> None:
        """Raise IdentityError if this certificate was revoked."""
        self._revocations.check(credential.serial, str(credential))

    def install(self, pem: bytes) -> tuple[int, int]:
        """Take over a list that an operator sent; how many it revokes, and how many were new.

        Raises ConfigurationError, IdentityError for a list of another authority, StorageError.
        """
        found = parse_revocations(pem, self._authority.read_bytes(), source="the list sent")
        if found.number > self._number:
            try:
                write_whole(self._kept, pem, 0o600)
            except OSError as error:
                raise StorageError(
                    f"{self._kept} can't be written ({error.strerror}); make room and send the "
                    "list again"
                ) from error
            self._number = found.number
        return len(found.revoked), self._take(found)

    async def watch(self) -> None:
        """Follow the watched file until cancelled."""
        if self._watched is None:
            return
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            seen = stamp(self._watched)
            if seen == self._stamp:
                continue
            self._stamp = seen
            try:
                found = await asyncio.to_thread(read_revocations, self._watched, self._authority)
            except PotluckError as error:
                log.error("changed revocation list can't be used", why=error.message)
            else:
                self._take(found)

    def _take(self, found: RevocationList) -> int:
        new = self._revocations.add(found)
        if new:
            log.warning("certificates revoked", serials=[f"{serial:x}" for serial in sorted(new)])
            for listener in self._listeners:
                listener(new)
        return len(new)
