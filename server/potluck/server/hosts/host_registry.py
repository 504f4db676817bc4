"""Registers hosts that connect, and stores when each was last in contact."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import structlog

from potluck.common.errors import AttendsElsewhereError, PotluckError
from potluck.common.monitoring import definitions as metrics
from potluck.common.monitoring.instruments import Instruments
from potluck.server.hosts.attendance import Attendance, HostSession
from potluck.server.store.records import ClientSeen
from potluck.server.store.store_thread import InStore

# Duplicate hosts ----------------------------------------------------------------------------------
# If two processes connect as the same host, the process that connected first stays if it is alive.
# A restarted host has the same certificate as its old process, whose stream may still look open if
# a machine or a network failed without closing it. So the new process waits until the old one sends
# a message, or has been silent for longer than any live host.

log = structlog.get_logger()

_HEARTBEATS = 3
"""Number of heartbeats missed in a row after which a host counts as silent."""
_MOST_SECONDS = 20.0
"""Maximum seconds to wait; shorter than the timeout of the host that connects."""


class DuplicateHostGuard:
    """Decides which of two processes of a host stays connected. Used on the event loop.

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
        """Return True when a host sends a message; False once it misses the allowed heartbeats.

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
        on the same path are treated as one if an id is missing."""
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
        line = "two processes with one certificate"
        known = self._told.get(session.host_id) == pair
        self._told[session.host_id] = pair
        if not known and self._attendance.lines.allows((line, session.host_id)):
            log.warning(
                line,
                host=session.host_id,
                attends=other.address,
                since=other.since.isoformat(),
                refused=session.address,
            )
        raise AttendsElsewhereError(
            f"another process is connected as host '{session.host_id}', from {other.address} "
            f"since {other.since:%Y-%m-%d %H:%M:%S} UTC; stop one of the two processes, or issue "
            "another certificate for this host with `potluck pki issue`",
            host=session.host_id,
            address=other.address,
            since=other.since.isoformat(),
        )


# The registry -------------------------------------------------------------------------------------


class HostRegistry:
    """Registers hosts that connect and disconnect. Used on the event loop."""

    def __init__(
        self,
        attendance: Attendance,
        instruments: Instruments,
        in_store: InStore,
        *,
        heartbeat_seconds: float,
    ) -> None:
        self._attendance = attendance
        self._instruments = instruments
        self._in_store = in_store
        self._duplicates = DuplicateHostGuard(attendance, heartbeat_seconds=heartbeat_seconds)
        self._noting: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def attending(self, session: HostSession) -> AsyncIterator[None]:
        """Register a connected host, for as long as the block runs.

        Raises IdentityError if another process is connected as this host.
        """
        await self._duplicates.make_way(session)
        self._attendance.attach(session)
        self._instruments.count(metrics.HOSTS_JOINED)
        if self._attendance.lines.allows(("host attends", session.host_id)):
            log.info(
                "host attends",
                host=session.host_id,
                clients=len(session.client_ids),
                device=session.device,
                address=session.address,
                **({"relay": session.relay} if session.relay else {}),
            )
        try:
            await self._see(session)
            yield
        finally:
            self._left(session)

    def _left(self, session: HostSession) -> None:
        if self._attendance.detach(session):
            self._instruments.count(metrics.HOSTS_LEFT)
            if self._attendance.lines.allows(("host left", session.host_id)):
                log.warning("host left", host=session.host_id, clients=len(session.client_ids))
            noting = asyncio.create_task(self._note(session))
            self._noting.add(noting)
            noting.add_done_callback(self._noting.discard)

    async def close(self) -> None:
        """Wait until all times of contact are stored."""
        await asyncio.gather(*self._noting)

    async def _note(self, session: HostSession) -> None:
        try:
            await self._see(session)
        except PotluckError as error:  # no failure of the host: the times are only for display
            log.warning(
                "time of a host's last contact not stored", host=session.host_id, why=error.message
            )

    async def _see(self, session: HostSession) -> None:
        """Store the time at which a host's last message arrived.

        This is done only when the host connects and disconnects: one write per heartbeat would be
        too many.
        """
        seen = [
            ClientSeen(
                client_id=client,
                host_id=session.host_id,
                device=session.device,
                at=session.last_heard,
            )
            for client in session.client_ids
        ]
        await self._in_store(lambda store: store.see_clients(seen))
