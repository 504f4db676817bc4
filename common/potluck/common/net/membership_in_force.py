"""The newest member list that a party has seen. It is never replaced by an older one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog

from potluck.common.errors import IdentityError, PotluckError
from potluck.common.net.file_stamp import Stamp, stamp
from potluck.common.net.key_files import PUBLIC_MODE, write_file
from potluck.common.net.membership import Members, load_public_key, read_file, verified_members

log = structlog.get_logger()

KEPT: Final = "members.json"
"""Name of the file in the state directory with the newest member list seen."""

LOOK_SECONDS: Final = 1.0
"""Seconds between checks of the watched file; a check takes one system call."""

MembersListener = Callable[[Members], None]


class MembershipInForce:
    """The current members, from a watched file and from documents that peers send.

    Use it on the event loop only. A new document is stored on disk before it is used, so that a
    restart does not return to an older one.
    """

    def __init__(
        self, root: Path, *, federation: str, file: Path | None, state_directory: Path
    ) -> None:
        """root: file of the federation root's public key. file: the configured members.json; None
        if there is none.

        Raises ConfigurationError or IdentityError if a file can't be used; StorageError.
        """
        self.members: Members | None = None
        """The current members; None if no member list has arrived yet."""
        self.document = b""
        """The members.json of the current members, as the root signed it; empty if there is none.
        """
        self._federation = federation
        self._root = load_public_key(root)
        self._file = file
        self._kept = state_directory / KEPT
        self._listeners: list[MembersListener] = []
        self._stamp: Stamp = () if file is None else stamp(file)
        if self._kept.exists():
            self.document = read_file(self._kept)
            self.members = self._verified(self.document, str(self._kept))
        if file is not None:
            self._take_file(file)

    @property
    def epoch(self) -> int:
        """Epoch of the current member list; 0 without one."""
        return 0 if self.members is None else self.members.epoch

    def listen(self, listener: MembersListener) -> Callable[[], None]:
        """Register a listener that is called with the members of every newer epoch. Call the
        returned function to unregister it."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def take(self, document: bytes, source: str) -> bool:
        """Use a members.json if it is newer than the current one. Return True if it was newer.

        Raises ConfigurationError or IdentityError if it can't be used; IdentityError if it has the
        epoch of the current one but differs from it; StorageError.
        """
        found = self._verified(document, source)
        known = self.members
        if known is not None and found.epoch == known.epoch and found.digest != known.digest:
            raise IdentityError(
                f"{source}: the federation root has signed two member lists of epoch "
                f"{found.epoch}; create the next one with `potluck pki member`, and send it to all "
                "parties"
            )
        if found.epoch <= self.epoch:
            return False
        write_file(self._kept, document, PUBLIC_MODE, remedy="free space on this disk")
        self.members, self.document = found, document
        log.info(
            "membership in force",
            epoch=found.epoch,
            members=len(found.records),
            revoked=len(found.revoked),
        )
        for listener in list(self._listeners):
            listener(found)
        return True

    async def watch(self) -> None:
        """Read the configured file when it changes. Runs until cancelled."""
        while self._file is not None:
            await asyncio.sleep(LOOK_SECONDS)
            seen = stamp(self._file)
            if seen == self._stamp:
                continue
            self._stamp = seen
            try:
                self._take_file(self._file)
            except PotluckError as error:  # for example, the file is being replaced
                log.error("changed member list can't be used", why=error.message)

    def _take_file(self, file: Path) -> None:
        document = read_file(file)
        found = self._verified(document, str(file))
        if found.epoch < self.epoch:
            log.warning(
                f"{file} is of membership epoch {found.epoch}, but this process already uses "
                f"epoch {self.epoch}, which stays in force; get the newest members.json"
            )
        else:
            self.take(document, str(file))

    def _verified(self, document: bytes, source: str) -> Members:
        return verified_members(document, self._root, federation=self._federation, source=source)
