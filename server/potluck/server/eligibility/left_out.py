"""Excludes clients that can't take part in a run until their host is restarted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from potluck.server.clock import utc
from potluck.server.hosts.attendance import Attendance
from potluck.server.machine import events as rounds
from potluck.server.machine.troubles import each_once
from potluck.server.plan.cohort_limits import ineligible
from potluck.server.plan.plan import RunPlan
from potluck.server.store.records import LeftOutRow
from potluck.server.store.store_thread import InStore


class LeftOutRegister:
    """The clients excluded from one run. Sends each change to the state machine."""

    def __init__(
        self,
        run_id: str,
        plan: RunPlan,
        attendance: Attendance,
        in_store: InStore,
        post: Callable[[rounds.Event], None],
    ) -> None:
        self._run_id = run_id
        self._task = plan.run_file.task.name
        self._eligible = plan.run_file.selector_limits.eligible
        self._attendance = attendance
        self._in_store = in_store
        self._post = post
        self._rows: dict[str, LeftOutRow] = {}

    def __contains__(self, client: str) -> bool:
        return client in self._rows

    @property
    def troubles(self) -> dict[str, str]:
        """The reason for each excluded client."""
        return {client: row.trouble for client, row in self._rows.items()}

    def summary(self) -> str:
        """Return a text that lists the excluded clients with the reasons; empty if there are
        none."""
        return each_once(self.troubles, "excluded")

    def restore(self, rows: Iterable[LeftOutRow]) -> None:
        """Load the rows that were stored before a restart."""
        self._rows |= {row.client_id: row for row in rows}

    def add(self, troubles: Mapping[str, str]) -> None:
        """Exclude clients. The caller must store them before the state machine selects again."""
        new = {client: why for client, why in troubles.items() if client not in self._rows}
        for client, why in new.items():
            session = self._attendance.session_of(client)
            process_id = "" if session is None else session.process_id
            self._rows[client] = LeftOutRow(
                client_id=client, process_id=process_id, trouble=why, at=utc()
            )
        if new:
            self._post(rounds.LeftOut(tuple(new.items())))

    async def add_and_store(self, troubles: Mapping[str, str]) -> None:
        """Exclude clients, and wait until the store has recorded it."""
        self.add(troubles)
        await self.store(tuple(troubles))

    def welcome(self, clients: Sequence[str]) -> None:
        """Readmit or exclude clients whose host has connected.

        Clients whose host was restarted may take part again. Clients whose host lacks the run's
        task, or a tag that the run demands, are excluded.
        """
        sessions = {client: self._attendance.session_of(client) for client in clients}
        back = [
            client
            for client, session in sessions.items()
            if session is not None
            and client in self._rows
            and self._rows[client].process_id != session.process_id
        ]
        for client in back:
            del self._rows[client]
        if back:
            self._post(rounds.Readmitted(tuple(back)))
        why = (
            f"task '{self._task}' is not installed on the host; install it there and restart "
            "the host"
        )
        attending = {client: session for client, session in sessions.items() if session}
        self.add({c: why for c, each in attending.items() if not each.offers(self._task)})
        unfit = {c: ineligible(each.tags, self._eligible) for c, each in attending.items()}
        self.add({client: why for client, why in unfit.items() if why})

    async def store(self, clients: Sequence[str]) -> None:
        """Record in the store that these clients are excluded."""
        rows = [self._rows[client] for client in clients if client in self._rows]
        await self._in_store(lambda store: store.leave_out(self._run_id, rows))

    async def remove_from_store(self, clients: Sequence[str]) -> None:
        """Record in the store that these clients may take part again."""
        await self._in_store(lambda store: store.let_in(self._run_id, clients))
