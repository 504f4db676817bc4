"""Registers hosts that connect, and stores when each was last in contact."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import structlog

from potluck.common.errors import PotluckError
from potluck.common.monitoring import definitions as metrics
from potluck.common.monitoring.instruments import Instruments
from potluck.server.hosts.attendance import Attendance, HostSession
from potluck.server.hosts.duplicate_hosts import DuplicateHostGuard
from potluck.server.store.records import ClientSeen
from potluck.server.store.store_thread import InStore

log = structlog.get_logger()


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
        """Keep a host that has connected registered while the block runs.

        Raises IdentityError if another process is connected as this host.
        """
        await self._duplicates.make_way(session)
        self._attendance.attach(session)
        self._instruments.count(metrics.HOSTS_JOINED)
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
        except PotluckError as error:  # not essential
            log.warning("last contact not stored", host=session.host_id, why=error.message)

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
