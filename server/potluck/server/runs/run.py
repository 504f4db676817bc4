"""Where a run under way stands: what its parts share.

`driver.py` drives a run; preparing, selecting, training and finishing a round are modules of their
own, each a class made with the run's `Run`. Everything here lives on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import numpy as np
import structlog
from numpy.typing import NDArray

from potluck.common.learning.scores import Metrics
from potluck.rpc.v1 import operator_pb2
from potluck.server.aggregation.model_files import ModelVersion
from potluck.server.aggregation.model_work import ModelWork, States
from potluck.server.aggregation.spool import Spool
from potluck.server.aggregation.update_files import SpooledUpdate
from potluck.server.cohorts.sample_limits import counted
from potluck.server.hosts.instructions import train_instruction_id
from potluck.server.profiles.collect import Profiling
from potluck.server.rounds import events as rounds
from potluck.server.rounds.machine import RoundMachine
from potluck.server.rounds.plan import RunPlan
from potluck.server.rounds.troubles import told_once
from potluck.server.runs.eligibility import Eligibility
from potluck.server.runs.feed import RunFeed, run_status, waiting_message
from potluck.server.runs.services import RunServices, now, utc
from potluck.server.selection import Answers, Population, Rows
from potluck.server.state import State
from potluck.server.store.records import (
    AttemptKey,
    LeftOutRow,
    Participation,
    RoundRow,
    RunRow,
    RunState,
)

log = structlog.get_logger()


@dataclass(kw_only=True)
class Attempt:
    """What is known and measured of the round under way."""

    begun: float = field(default_factory=now)
    bytes_down: int = 0
    bytes_up: int = 0
    told: dict[str, float] = field(default_factory=dict)
    """When each client was told to train."""
    hosts: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    updates: dict[str, SpooledUpdate] = field(default_factory=dict)
    quotas: dict[str, Sequence[float]] = field(default_factory=dict)
    """The most samples of each class that a client trains on; absent for no limit."""
    cohort: tuple[str, ...] = ()
    available: tuple[str, ...] = ()
    answers: list[Answers] = field(default_factory=list)
    """What clients were asked before the cohort was chosen, and said."""
    model: ModelVersion | None = None
    """The round's result, once there is one."""
    strategy_state: State | None = None
    metrics: Metrics | None = None


class Run:
    """Where a run stands, and the few things that all its parts do."""

    def __init__(
        self,
        row: RunRow,
        plan: RunPlan,
        work: ModelWork,
        spool: Spool,
        services: RunServices,
    ) -> None:
        self.row = row
        self.plan = plan
        self.work = work
        self.spool = spool
        self.services = services
        self.feed = RunFeed()
        self.log = log.bind(run=row.run_id)
        self.profiling = Profiling(
            row.run_id, plan, services.attendance, services.in_store, services.trust
        )
        self.profiling.observe = services.observer.profile
        self.eligibility = Eligibility(
            plan,
            self.profiling,
            say=lambda text: self.say(text, warning=True),
            leave_out=self.leave_out_now,
        )
        self.machine = RoundMachine(plan.rules)
        self.events: asyncio.Queue[rounds.Event] = asyncio.Queue()
        self.state = RunState.WAITING
        self.facts = Attempt()
        self.model: ModelVersion | None = None
        """The model clients train from."""
        self.model_before: ModelVersion | None = None
        """The one they trained from before, as long as something is to be learnt from it."""
        self.states = States(selector=State(), strategy=State())
        """What selector and strategy remember, as of the last committed round."""
        self.begun_attempt: AttemptKey | None = None
        """The attempt that is in the store."""
        self.samples: dict[str, int] = {}
        """Training samples, by client, as told with the last update that was included."""
        self.included_updates: dict[str, str] = {}
        """The last update of each client that became part of the model."""
        self.offenders: set[str] = set()
        """Whose updates were refused for their numbers since they were judged last."""
        self.label_totals: NDArray[np.float64] | None = None
        """All clients' label counts, where a secure sum gave them."""
        self.cell_counts: dict[str, NDArray[np.float64]] = {}
        """By client, the mean label counts of its cell, where it was summed by cells."""
        self.left_out: dict[str, LeftOutRow] = {}
        """Clients that can't take part, until another process of their host says hello."""
        self.roster: list[str] = []
        self._epoch = utc() - timedelta(seconds=now())
        """When monotonic time began, as a time of day."""
        self._row_of: dict[str, int] = {}

    # Clients ----------------------------------------------------------------------------------

    def enrol(self, clients: Sequence[str]) -> None:
        """Append clients to the roster, in this order."""
        for client in clients:
            self._row_of[client] = len(self.roster)
            self.roster.append(client)

    def rows(self, clients: Sequence[str]) -> Rows:
        """The rows of clients, as selectors know them."""
        return np.array([self._row_of[client] for client in clients], dtype=np.int64)

    def population(self) -> Population:
        """The roster as selectors see it."""
        columns = dict(self.eligibility.columns())
        if self.profiling.by_cell:
            unknown = np.full(self.plan.task.classes, np.nan)
            rows = [self.cell_counts.get(client, unknown) for client in self.roster]
            columns["label_counts"] = np.array(rows).reshape(len(rows), len(unknown))
        return Population(
            ids=self.roster,
            classes=self.plan.task.classes,
            samples=self._counted_samples(),
            label_totals=self.label_totals,
            **columns,
        )

    def _counted_samples(self) -> NDArray[np.int64]:
        """What the roster's clients count with; 0 where it is not known."""
        samples = np.array([self.samples.get(c, 0) for c in self.roster], dtype=np.int64)
        known = samples > 0
        samples[known] = counted(samples[known], self.plan.run_file.sample_limits)
        return samples

    # Committed rounds -------------------------------------------------------------------------

    def remember(self, row: RoundRow) -> None:
        """What is known of clients from a committed round on."""
        self.samples |= row.disclosed_samples
        self.eligibility.note_samples(row.disclosed_samples)
        for member in row.included:
            update_id = train_instruction_id(*row.key, member.client_id)
            self.included_updates[member.client_id] = update_id
        self.eligibility.count_picks([member.client_id for member in row.members])

    def recall(self, participations: Sequence[Participation]) -> None:
        """The same of all rounds that were committed before the run is resumed."""
        for each in participations:
            if each.samples is not None:
                self.samples[each.client_id] = each.samples
            if each.included_round is not None and each.included_attempt is not None:
                key = (self.row.run_id, each.included_round, each.included_attempt)
                self.included_updates[each.client_id] = train_instruction_id(*key, each.client_id)
        self.eligibility.restore_picks({each.client_id: each.picks for each in participations})

    async def judge_offenders(self) -> None:
        """An attempt is over to which others' updates came: who spoiled theirs is to answer for
        it."""
        offenders, self.offenders = self.offenders, set()
        for client, why in (await self.services.offended(sorted(offenders))).items():
            self.say(f"{client} is in quarantine: {why}; see `potluck clients`", warning=True)

    # Clients that can't take part -------------------------------------------------------------

    def leave_out(self, troubles: Mapping[str, str]) -> None:
        """Clients can't take part, for reasons that stay the same until their host is started
        anew. What the machine is told is in the store before it selects again."""
        new = {client: why for client, why in troubles.items() if client not in self.left_out}
        for client, why in new.items():
            session = self.services.attendance.session_of(client)
            process_id = "" if session is None else session.process_id
            self.left_out[client] = LeftOutRow(
                client_id=client, process_id=process_id, trouble=why, at=utc()
            )
        if new:
            self.post(rounds.LeftOut(tuple(new.items())))

    async def leave_out_now(self, troubles: Mapping[str, str]) -> None:
        """As `leave_out`, and in the store when this returns: for what is done before the machine
        hears of it."""
        self.leave_out(troubles)
        await self.record_left_out(tuple(troubles))

    def welcome(self, clients: Sequence[str]) -> None:
        """Clients attend: may be with another process than the one that could not take part, may be
        with one that can't."""
        sessions = {c: self.services.attendance.session_of(c) for c in clients}
        back = [
            client
            for client, session in sessions.items()
            if session is not None
            and client in self.left_out
            and self.left_out[client].process_id != session.process_id
        ]
        for client in back:
            del self.left_out[client]
        if back:
            self.post(rounds.Readmitted(tuple(back)))
        task = self.plan.run_file.task.name
        why = (
            f"task '{task}' is not installed on its host; install it there and start the host anew"
        )
        self.leave_out(
            {c: why for c, session in sessions.items() if session and not session.offers(task)}
        )

    def told_left_out(self) -> str:
        """Who can't take part and why, for people; nothing where all can."""
        if self.state not in (RunState.WAITING, RunState.RUNNING):
            return ""
        return told_once({c: row.trouble for c, row in self.left_out.items()}, "left out")

    async def record_left_out(self, clients: Sequence[str]) -> None:
        """Have it in the store that clients can't take part."""
        run_id = self.row.run_id
        rows = [self.left_out[client] for client in clients if client in self.left_out]
        await self.services.in_store(lambda store: store.leave_out(run_id, rows))
        self.publish_status()

    async def record_readmitted(self, clients: Sequence[str]) -> None:
        """Have it in the store that clients can take part again."""
        run_id = self.row.run_id
        await self.services.in_store(lambda store: store.let_in(run_id, clients))
        self.publish_status()

    # The attempt under way --------------------------------------------------------------------

    @property
    def key(self) -> AttemptKey:
        """The attempt under way."""
        return AttemptKey(self.row.run_id, self.machine.round, self.machine.attempt)

    def instruction_id(self, client: str) -> str:
        """The id of a client's training, and of its update, in the attempt under way."""
        machine = self.machine
        return train_instruction_id(self.row.run_id, machine.round, machine.attempt, client)

    def is_present(self, client: str) -> bool:
        """Whether a client attends, or may still come back in time."""
        return self.machine.is_present(client, now())

    def post(self, event: rounds.Event) -> None:
        """Something happened."""
        self.events.put_nowait(event)

    # Telling ----------------------------------------------------------------------------------

    async def set_state(self, state: RunState, reason: str) -> None:
        """The run is in another state from now on."""
        run_id, in_store = self.row.run_id, self.services.in_store
        self.state = state
        await in_store(lambda store: store.set_run_state(run_id, state, reason, utc()))
        self.row = await in_store(lambda store: store.run(run_id))
        self.publish_status()

    def publish_status(self) -> None:
        """Tell those who watch where the run stands."""
        self.feed.publish(operator_pb2.WatchRunResponse(status=self.status()))

    def status(self) -> operator_pb2.RunStatus:
        """Where the run stands."""
        return run_status(self.row, self.waiting(), self.told_left_out())

    def waiting(self) -> operator_pb2.Waiting | None:
        """What the run waits for; None while a round is under way."""
        waiting = self.machine.waiting
        if waiting is None:
            return None
        until = None if waiting.until is None else self._epoch + timedelta(seconds=waiting.until)
        return waiting_message(waiting, until, self.machine.away())

    def say(self, text: str, *, warning: bool = False) -> None:
        """Something a person should know."""
        (self.log.warning if warning else self.log.info)(text)
        self.feed.say(text, utc(), warning=warning)
