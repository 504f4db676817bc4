"""The clients of a run: their profiles, and the rules that decide which may be selected."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from potluck.server.eligibility.alarms import SelectionAlarms, TagLimit
from potluck.server.eligibility.eligibility import Eligibility
from potluck.server.eligibility.left_out import LeftOutRegister
from potluck.server.hosts.attendance import Attendance
from potluck.server.machine.roster import RunRoster
from potluck.server.plan.plan import RunPlan
from potluck.server.profiles.collect import Profiling
from potluck.server.selection import Population
from potluck.server.store.records import Participation, RoundRow
from potluck.server.store.store_thread import InStore


class Selecting:
    """Owns the profiles of a run's clients, the rules by which they may be selected, and the alarms
    about suspicious clients.

    Used on the event loop.
    """

    def __init__(
        self,
        run_id: str,
        plan: RunPlan,
        profiling: Profiling,
        eligibility: Eligibility,
        alarms: SelectionAlarms,
        *,
        attendance: Attendance,
        in_store: InStore,
    ) -> None:
        self.profiling = profiling
        self.eligibility = eligibility
        self.alarms = alarms
        self._run_id = run_id
        self._plan = plan
        self._attendance = attendance
        self._in_store = in_store

    @property
    def roster(self) -> RunRoster:
        """The run's clients."""
        return self.profiling.roster

    @property
    def left_out(self) -> LeftOutRegister:
        """The clients that can't take part."""
        return self.eligibility.left_out

    def population(self) -> Population:
        """The roster and its profiles, as passed to the selector."""
        return self.profiling.population(
            limits=self._plan.run_file.sample_limits,
            label_totals=self.eligibility.label_sums.totals,
            cell_counts=self.eligibility.label_sums.cell_counts,
        )

    def samples(self) -> NDArray[np.int64]:
        """Return the column `samples` of the population."""
        return self.profiling.samples(self._plan.run_file.sample_limits)

    def tag_limits(self) -> Sequence[TagLimit]:
        """For each limited tag: its value for each row of the roster, and the maximum number of
        clients with one value."""
        tags_of = self._attendance.tags_of
        return [
            (tag, [tags_of(client).get(tag, "") for client in self.roster], most)
            for tag, most in self._plan.run_file.selector_limits.at_most_per.items()
        ]

    def hosts(self) -> Sequence[str]:
        """The host of each row of the roster; an empty text if the host is unknown."""
        return [self.eligibility.host_of(client) for client in self.roster]

    async def admit(self, clients: Sequence[str]) -> None:
        """Record in the store that clients joined the roster, in this order, and read their stored
        profiles."""
        run_id = self._run_id
        await self._in_store(lambda store: store.append_to_roster(run_id, clients))
        await self.profiling.admit(clients)

    async def read_quarantine(self) -> None:
        """Read from the store which clients are in quarantine."""
        rows = await self._in_store(lambda store: store.quarantined())
        self.eligibility.quarantine([row.client_id for row in rows])

    def note_committed(self, row: RoundRow) -> None:
        """Update the records about the run's clients with a committed round."""
        self.roster.note_samples(row.disclosed_samples)
        self.alarms.look_at_samples(row.disclosed_samples)
        cohort = [member.client_id for member in row.members]
        self.eligibility.picks.add(cohort)
        self.alarms.look_at_picks(cohort)

    def recall(self, participations: Sequence[Participation]) -> None:
        """Restore each client's record of participation in the rounds committed before the run was
        resumed."""
        for each in participations:
            if each.samples is not None:
                self.roster.note_samples({each.client_id: each.samples})
        self.eligibility.picks.restore({each.client_id: each.picks for each in participations})
