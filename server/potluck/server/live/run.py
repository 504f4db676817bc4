"""A prepared run, with its model and its roster loaded.

`run/resume.py` creates it; `run/round_loop.py` runs its rounds, with `select/select.py`,
`run/train.py` and `run/commit.py`. Used on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from potluck.rpc.v1.coordinator_pb2 import KeptState
from potluck.server.clock import now, utc
from potluck.server.eligibility.host_cover import companions
from potluck.server.hosts.instructions import train_instruction_id
from potluck.server.live.feed import RunRecord
from potluck.server.live.models import Models
from potluck.server.live.run_privacy import RunPrivacy
from potluck.server.live.run_updates import Updates
from potluck.server.live.selecting import Selecting
from potluck.server.live.services import RunServices
from potluck.server.machine import events as rounds
from potluck.server.machine.machine import RoundMachine
from potluck.server.machine.roster import RunRoster
from potluck.server.plan.plan import RunPlan
from potluck.server.plan.trace_clock import TraceClock
from potluck.server.selection import Answers
from potluck.server.store.records import (
    AS_THE_RUN_SAYS,
    AttemptKey,
    BestSoFar,
    MemberWork,
    Participation,
    RoundRow,
    RunRow,
)


@dataclass(frozen=True, kw_only=True)
class CohortMember:
    """A selected client. work: quotas, weight, passes and omitted tensors that the selector set for
    it."""

    host: str
    reason: str
    work: MemberWork = AS_THE_RUN_SAYS


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """The current attempt at a round. Choosing the cohort replaces this object by a new one.

    cohort: chosen clients, in the order chosen; empty until the selector has chosen. answers:
    clients' answers to the selector's questions. spared: clients that skip their upload.
    companions: for each client, the clients on its host that may be trained together with it, in
    roster order.
    """

    begun: float = field(default_factory=now)
    cohort: Mapping[str, CohortMember] = field(default_factory=dict)
    answers: Sequence[Answers] = ()
    spared: set[str] = field(default_factory=set)
    companions: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(kw_only=True)
class Run:
    """A prepared run: its fixed data, and the objects that contain its changing state."""

    record: RunRecord
    plan: RunPlan
    services: RunServices
    events: asyncio.Queue[rounds.Event]
    machine: RoundMachine
    selecting: Selecting
    models: Models
    updates: Updates
    privacy: RunPrivacy
    trace_clock: TraceClock | None = None
    """Simulated time of a run whose clients follow a trace; None if they follow none."""
    attempt: Attempt = field(default_factory=Attempt)
    stored_attempt: AttemptKey | None = None
    """Key of the attempt in the store; None if there is none."""
    epoch: datetime = field(default_factory=lambda: utc() - timedelta(seconds=now()))
    """The UTC time at which monotonic time was 0."""

    def __post_init__(self) -> None:
        self.log = self.record.log
        self.say = self.record.say
        self.post = self.events.put_nowait

    @property
    def row(self) -> RunRow:
        """The run's row in the store."""
        return self.record.row

    @property
    def id(self) -> str:
        """The run's id."""
        return self.record.row.run_id

    @property
    def roster(self) -> RunRoster:
        """The run's clients."""
        return self.machine.pool.roster

    def kept_state(self, client: str, *, of_result: bool = False) -> KeptState | None:
        """Return the reference to a client's stored state that belongs to the run's model; None if
        clients store none.

        of_result: True for the state that belongs to the result of the current attempt.
        """
        if not self.plan.kept:
            return None
        included = self.updates.included(client)
        if of_result and client in self.machine.cohort.answered:
            included = self.instruction_id(client)
        return KeptState(included_update_id=included, purposes=self.plan.kept)

    # Committed rounds -------------------------------------------------------------------------

    def note_committed(self, row: RoundRow) -> None:
        """Update the records about the run's clients with a committed round."""
        if self.trace_clock is not None:
            self.trace_clock.commit(row.seconds)
        self.updates.note_included(row)
        self.selecting.note_committed(row)

    def recall(self, participations: Sequence[Participation]) -> None:
        """Restore each client's record of participation in the rounds committed before the run was
        resumed."""
        self.updates.recall(participations)
        self.selecting.recall(participations)

    # The attempt under way --------------------------------------------------------------------

    def begin_attempt(self) -> None:
        """Start an attempt, and discard all data of the previous one."""
        self.models.begin_attempt()
        self.updates.begin_attempt()
        self.attempt = Attempt()

    def choose_cohort(self, cohort: Mapping[str, CohortMember], answers: Sequence[Answers]) -> None:
        """Set the current attempt's cohort, in the order chosen, and the answers that clients gave
        before the choice."""
        in_order = sorted(cohort, key=self.roster.row)
        together = companions(
            (client, cohort[client].host, cohort[client].work.epochs) for client in in_order
        )
        self.attempt = replace(self.attempt, cohort=cohort, answers=answers, companions=together)

    def speed(self, client: str) -> float:
        """Return a client's relative speed in the current attempt; 1 if clients follow no trace."""
        return 1.0 if self.trace_clock is None else self.trace_clock.speed(client)

    def arrival(self, client: str, seconds: float) -> float:
        """Return the seconds until a client's update arrives: `seconds`, or infinity if the client
        becomes unavailable before, according to the trace."""
        clock = self.trace_clock
        return seconds if clock is None else clock.arrival(client, seconds)

    @property
    def key(self) -> AttemptKey:
        """The key of the current attempt."""
        return AttemptKey(self.id, self.machine.round, self.machine.attempt)

    def instruction_id(self, client: str) -> str:
        """Return the id of a client's training, and of its update, in the current attempt."""
        return train_instruction_id(*self.key, client)

    def companions_of(self, client: str) -> list[str]:
        """Return the instruction ids of the client and its companions; empty if it has no
        companions."""
        key = self.key  # computed once: in a cohort of n clients, up to n² ids are made
        return [
            train_instruction_id(*key, each) for each in self.attempt.companions.get(client, ())
        ]

    def is_present(self, client: str) -> bool:
        """Return True if a client is connected, or may still reconnect in time."""
        return self.machine.pool.is_present(client, now())

    def why_over(self, best: BestSoFar | None) -> str:
        """Return why the run ends early after a round; empty if it continues."""
        rule = self.plan.stop_rule
        return "" if rule is None else rule.why_over(best)
