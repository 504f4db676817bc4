"""Handles a second host process that connects with the certificate of a connected one.

The connected process stays if it is alive. A restarted host has the same certificate as its old
process, whose stream may still look open if a machine or a network failed without closing it. So
the new process waits until the old one sends a message, or has been silent for longer than any live
host.
"""

from __future__ import annotations

import asyncio
import contextlib

import structlog

from potluck.common.errors import AttendsElsewhereError
from potluck.server.hosts.attendance import Attendance, HostSession

log = structlog.get_logger()

_HEARTBEATS = 3
"""Number of heartbeats missed in a row after which a host counts as silent."""
_MOST_SECONDS = 20.0
"""Maximum seconds to wait; shorter than the timeout of the host that connects."""


class DuplicateHostGuard:
    """Decides which of two processes of a host stays connected. Lives on the event loop.

    A process that connects by another path, through a relay or directly, is treated as another
    process: a relay that claims a host's name must not disconnect the real host.
    """

    def __init__(self, attendance: Attendance, *, heartbeat_seconds: float) -> None:
        self._attendance = attendance
        self._heartbeat = min(heartbeat_seconds, _MOST_SECONDS / _HEARTBEATS)
        self._told: dict[str, tuple[str, str]] = {}

    async def make_way(self, session: HostSession) -> None:
        """Wait until this process may connect. Raises AttendsElsewhereError if the other process
        stays."""
        while (other := self._other(session)) is not None:
            heard = await self._heard(other)
            if self._other(session) is not other:
                continue
            if not heard:
                break
            self._refuse(session, other)
        self._told.pop(session.host_id, None)

    async def _heard(self, other: HostSession) -> bool:
        """Return True if a host sends a message before it has missed its heartbeats.

        Each heartbeat has its own wait. If this machine stalls, at most one heartbeat is missed,
        because messages that arrived meanwhile are read before the next wait.
        """
        other.heard.clear()
        for _ in range(_HEARTBEATS):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._heartbeat):
                    await other.heard.wait()
                return True
        return False

    def _other(self, session: HostSession) -> HostSession | None:
        """Return the other connected process of the same host; None if there is none. Two processes
        on the same path are taken for one if an id is missing."""
        other = self._attendance.host(session.host_id)
        if other is None:
            return None
        if other.relay != session.relay:
            return other
        if not (other.process_id and session.process_id):
            return None
        return None if other.process_id == session.process_id else other

    def _refuse(self, session: HostSession, other: HostSession) -> None:
        pair = (other.process_id, session.process_id)
        if self._told.get(session.host_id) != pair:
            self._told[session.host_id] = pair
            log.warning(
                "two processes with one certificate",
                host=session.host_id,
                attends=other.address,
                since=other.since.isoformat(),
                refused=session.address,
            )
        raise AttendsElsewhereError(
            f"another process is connected as host '{session.host_id}', from {other.address} since "
            f"{other.since:%Y-%m-%d %H:%M:%S} UTC; stop one of the two, or issue this one a "
            "certificate of its own with `potluck pki issue`",
            host=session.host_id,
            address=other.address,
            since=other.since.isoformat(),
        )
