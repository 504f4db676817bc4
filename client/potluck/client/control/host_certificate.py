"""The certificate with which a host or a relay connects.

The certificate is read again for every connection, and its files are watched. So renewing it needs
no restart.
"""

from __future__ import annotations

import asyncio
from typing import Final

import structlog

from potluck.common.errors import PotluckError
from potluck.common.net.file_stamp import stamp
from potluck.common.net.identity import Role
from potluck.common.net.tls import TlsFiles, TlsMaterial

log = structlog.get_logger()

LOOK_SECONDS: Final = 1.0
"""Seconds between two checks of the files; a check takes three system calls."""


class HostCertificate:
    """The certificate that is presented to the coordinator. Runs on the event loop."""

    def __init__(self, files: TlsFiles, role: Role = Role.HOST) -> None:
        self.files = files
        self._role = role
        self._shown: TlsMaterial | None = None

    def show(self) -> TlsMaterial:
        """Read and check the files for the next connection. Raises what `TlsFiles.load` raises."""
        self._shown = self.files.load(self._role)
        return self._shown

    def renewed(self) -> bool:
        """Return True if the files differ from those presented last and are valid."""
        try:
            return self.files.load(self._role) != self._shown
        except PotluckError:
            return False

    async def until_renewed(self) -> None:
        """Wait until the files are valid and differ from those presented last."""
        seen = self._look()
        while not self.renewed():
            while (now := self._look()) == seen:  # noqa: ASYNC110  # files give no signal
                await asyncio.sleep(LOOK_SECONDS)
            seen = now
            try:
                self.files.load(self._role)
            except PotluckError as error:  # wait: for example, the files are being replaced
                log.warning("changed certificate can't be used yet", why=error.message)

    def _look(self) -> tuple[object, ...]:
        return stamp(self.files.certificate, self.files.key, self.files.authority)
