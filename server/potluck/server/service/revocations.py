"""Loads revocations while the coordinator runs, from a watched file or from an operator.

A revoked peer is disconnected immediately, and its calls are refused from then on.
"""

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
"""Seconds between checks of the watched file; a check needs two system calls."""

KEPT = "revoked.pem"
"""Name of the file in the state directory with the newest revocation list that an operator sent."""


class Revoking:
    """The certificates that a coordinator treats as revoked. Used on the event loop."""

    def __init__(self, state_directory: Path, authority: Path, watched: Path | None) -> None:
        """watched: the configured file to watch; None if there is none.

        Raises ConfigurationError or IdentityError if a revocation list can't be used, because
        without it, the coordinator would admit revoked peers.
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
        """Register a listener that is called with the serial numbers of newly revoked
        certificates."""
        self._listeners.append(listener)

    def check(self, credential: Credential) -> None:
        """Raise IdentityError if this certificate was revoked."""
        self._revocations.check(credential.serial, str(credential))

    def install(self, pem: bytes) -> tuple[int, int]:
        """Install an operator's revocation list. Return the number of its revocations, and the
        number of new ones.

        Raises ConfigurationError; IdentityError if another authority signed the list; StorageError.
        """
        found = parse_revocations(pem, self._authority.read_bytes(), source="the list sent")
        if found.number > self._number:
            try:
                write_whole(self._kept, pem, 0o600)
            except OSError as error:
                raise StorageError(
                    f"{self._kept} can't be written ({error.strerror}); free disk space and send "
                    "the list again"
                ) from error
            self._number = found.number
        return len(found.revoked), self._take(found)

    async def watch(self) -> None:
        """Reload the watched file when it changes. Runs until cancelled."""
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
