"""The round engine's state machine: `handle(event, now) -> actions`.

No asyncio, no grpc, no clock, no disk: `now` is any monotonic number of seconds, passed in.
`run/round_loop.py` creates the events and carries out the actions. One machine drives one run; a
round passes through

    waiting → selecting → training → reducing → evaluating → committing

and, if the quorum is not reached, back to selecting with the next attempt.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from potluck.server.machine.client_pool import ClientPool
from potluck.server.machine.cohort import CohortOutcome, Member, RoundCohort
from potluck.server.machine.events import (
    STOPPED_BY_OPERATOR,
    Action,
    ActionFailed,
    Admit,
    ClientFailed,
    Commit,
    Committed,
    DecideUploads,
    End,
    Evaluate,
    Evaluated,
    Event,
    Excluded,
    GiveUpAttempt,
    Joined,
    LeaveOut,
    Left,
    LeftOut,
    PublishNotice,
    Readmit,
    Readmitted,
    Reduce,
    Reduced,
    RunEnding,
    Select,
    Selected,
    Started,
    StillTraining,
    StopRequested,
    StoredAnswersInvalid,
    SumArrived,
    SumFailed,
    TimerFired,
    TooFewEligible,
    Train,
    UpdateArrived,
    UpdateReady,
    UploadsDecided,
)
from potluck.server.machine.roster import RunRoster
from potluck.server.machine.round_rules import RoundRules
from potluck.server.machine.troubles import counted, each_once, listed
from potluck.server.machine.waiting import AttemptCount, Waiting
from potluck.server.store.records import AttemptState, FailedAttempt, MemberState


class Phase(StrEnum):
    """The phases of a run."""

    WAITING = "waiting"
    SELECTING = "select"
    TRAINING = "train"
    REDUCING = "reduce"
    EVALUATING = "evaluate"
    COMMITTING = "commit"
    ENDED = "ended"


@dataclass(frozen=True, kw_only=True)
class Resumption:
    """The state of a run when its coordinator ended.

    available, cohort: clients of the interrupted attempt; both empty if there was none. cohort maps
    clients, in the order chosen, to their state. spent: number of attempts at this round that are
    not counted against its limit, such as those before the run failed. failed: number of failed
    attempts at this round that counted when they failed. spared: clients that failed an attempt at
    this round. seconds: by client, durations in seconds of the trainings whose updates have
    arrived. left_out: clients that can't take part, with the reasons. uploads_decided: True if
    clients had offered their updates, and the selector had chosen among them. why_over: reason why
    the run ends early with the last committed round; empty if it does not.
    """

    roster: RunRoster = field(default_factory=RunRoster)
    committed: int = 0
    attempt: int = 1
    spent: int = 0
    failed: int = 0
    spared: Collection[str] = ()
    available: tuple[str, ...] = ()
    cohort: Sequence[tuple[str, MemberState]] = field(default_factory=tuple)
    seconds: Mapping[str, float] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    uploads_decided: bool = False
    why_over: str = ""


class RoundMachine:
    """State machine of one run. Call `handle` with each event; carry out the returned actions in
    order."""

    def __init__(self, rules: RoundRules, resumption: Resumption | None = None) -> None:
        was = resumption or Resumption()
        self.rules = rules
        self.phase = Phase.WAITING
        self.round = was.committed + 1
        self.attempts = AttemptCount(rules.policy.attempts, was.attempt, was.spent, was.failed)
        under_way = was.committed > 0 or was.attempt > 1 or bool(was.available)
        self.pool = ClientPool(rules, was.roster, under_way=under_way)
        self.pool.left_out.add(was.left_out)
        self.pool.spared.update(was.spared)
        self.cohort = self._cohort(
            {
                client: Member(state=state, seconds=was.seconds.get(client, 0.0))
                for client, state in was.cohort
            }
        )
        self._started = False
        self._stored_available = () if was.cohort else was.available  # for the first selection only
        self._said_waiting = False
        self._round_deadline = 0.0
        self._decided = was.uploads_decided
        self._why_over = was.why_over

    @property
    def attempt(self) -> int:
        """The number of the attempt under way, from 1."""
        return self.attempts.number

    @property
    def waiting(self) -> Waiting | None:
        """The current wait of the run for clients; None while a round is under way."""
        return self.pool.waiting if self.phase is Phase.WAITING else None

    def next_wakeup(self) -> float | None:
        """Time at which the machine needs a TimerFired event; None if it needs none."""
        if self.phase is Phase.WAITING and self._started:
            return self.pool.wake
        if self.phase is not Phase.TRAINING:
            return None
        presence = self.pool.presence
        away = [client for client in self.cohort.pending if not presence.attends(client)]
        deadline = [] if self.cohort.deciding else [self._round_deadline]
        return min([*deadline, *map(presence.back_by, away)], default=None)

    # Events -----------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Action]:
        """Handle an event and return the resulting actions; empty if the event is outdated."""
        if self.phase is Phase.ENDED:
            return []
        match event:
            case Started():
                return self._start(now)
            case Joined(clients, hosts):
                return self._join(clients, hosts, now)
            case Left(clients):
                return self._leave(clients, now)
            case Excluded(clients):
                self.pool.excluded = frozenset(clients)
                return self._select_if_ready(now)
            case StillTraining(clients):
                self.pool.still_training = frozenset(clients)
                return self._select_if_ready(now)
            case LeftOut(troubles):
                return self._leave_out(dict(troubles), now)
            case Readmitted(clients):
                return self._readmit(clients, now)
            case Selected(cohort) if self.phase is Phase.SELECTING:
                self.cohort = self._cohort({client: Member() for client in cohort})
                return self._train(now)
            case TooFewEligible(reason) if self.phase is Phase.SELECTING:
                return self._select_later(reason, now)
            case StoredAnswersInvalid(reason) if self.phase is Phase.SELECTING:
                return self._begin_anew(reason, now)
            case UpdateArrived(client, seconds) if self.cohort.waits_for(client):
                self.cohort.receive(client, seconds)
                return self._go_on(now)
            case SumArrived(updates):
                waited_for = [each for each in updates if self.cohort.waits_for(each[0])]
                for client, seconds in waited_for:
                    self.cohort.receive(client, seconds)
                return self._go_on(now) if waited_for else []
            case UpdateReady(client) if self.cohort.waits_for(client):
                self.cohort.offered.add(client)
                return self._go_on(now)
            case UploadsDecided(round, attempt, spared) if (round, attempt) == (
                self.round,
                self.attempt,
            ) and self.cohort.deciding:
                return self._ask_for_uploads(spared, now)
            case ClientFailed(client, trouble) if self.cohort.waits_for(client):
                dropped = self.cohort.drop([client], MemberState.FAILED, trouble)
                return dropped + self._go_on(now)
            case SumFailed(round, attempt) if (round, attempt) == (self.round, self.attempt):
                return self._without_sum(event, now)
            case Reduced() if self.phase is Phase.REDUCING:
                return self._evaluate()
            case Evaluated() if self.phase is Phase.EVALUATING:
                return self._commit()
            case Committed(why_over) if self.phase is Phase.COMMITTING:
                self._why_over = why_over
                return self._next_round(now)
            case ActionFailed(reason):
                return self._end(RunEnding.FAILED, reason)
            case StopRequested():
                return self._end(RunEnding.STOPPED, STOPPED_BY_OPERATOR)
            case TimerFired():
                return self._tick(now)
        return []

    # Waiting ----------------------------------------------------------------------------------

    def _start(self, now: float) -> list[Action]:
        self._started = True
        if self._why_over or self.round > self.rules.rounds:
            # the coordinator was killed after the last commit, before it could end the run
            return self._end(RunEnding.FINISHED, self._why_over)
        self.pool.start(now)
        return self._train(now) if self.cohort else self._select_if_ready(now)

    def _join(self, clients: tuple[str, ...], hosts: Mapping[str, str], now: float) -> list[Action]:
        pool, actions = self.pool, list[Action]()
        pool.presence.join(clients, hosts)
        admitted, refused = pool.admit_late(clients)
        if admitted:
            actions.append(Admit(admitted))
        if refused:
            text = f"{listed(refused)} came too late for this run and will not be selected"
            actions.append(PublishNotice(text))
        return actions + self._select_if_ready(now)

    def _leave(self, clients: tuple[str, ...], now: float) -> list[Action]:
        self.pool.presence.leave(clients, now)
        return self._tick(now)

    def _select_if_ready(self, now: float) -> list[Action]:
        if self.phase is not Phase.WAITING or not self._started:
            return []
        pool, actions = self.pool, list[Action]()
        if not pool.roster:
            first = pool.first_roster(now)
            if not first:
                return self._keep_waiting()
            pool.roster.append(first)
            pool.begin(now)
            actions.append(Admit(first))
        available = pool.ready(now)
        if not available:
            return actions + self._keep_waiting()
        if self._stored_available:
            available = pool.selectable(self._stored_available)
            if not pool.suffices(available, self.rules.needed):
                return self._begin_anew(
                    "fewer clients may be selected than before the restart", now
                )
        self._stored_available = ()
        self._said_waiting = False
        self.phase = Phase.SELECTING
        count = self.rules.clients_per_round + self.rules.policy.over_selection
        return [*actions, Select(self.round, self.attempt, available, count)]

    def _keep_waiting(self) -> list[Action]:
        pool, waiting = self.pool, self.pool.waiting
        if pool.given_up:
            return self._end(RunEnding.FAILED, pool.given_up)
        if self._said_waiting or waiting is None or waiting.until is not None:
            return []
        self._said_waiting = True
        away = pool.away()
        whom = f"; disconnected: {listed(away)}" if away else ""
        return [PublishNotice(f"round {self.round}: {waiting.what}{whom}", warning=True)]

    def _select_later(self, reason: str, now: float) -> list[Action]:
        """Pause before the next selection. A run that never selected a cohort fails if it has
        waited too long."""
        self.phase = Phase.WAITING
        if self.pool.is_overdue(now):
            return self._end(RunEnding.FAILED, reason)
        self.pool.begin(now, self.attempts.pause())
        return [
            PublishNotice(f"{reason}; trying again later", warning=True),
            *self._select_if_ready(now),
        ]

    def _begin_anew(self, reason: str, now: float) -> list[Action]:
        """Start another attempt; the current one does not count against the maximum number of
        attempts."""
        actions: list[Action] = [
            GiveUpAttempt(self.round, self.attempt, reason),
            PublishNotice(reason),
        ]
        self.attempts.begin_anew()
        self._stored_available = ()
        self.phase = Phase.WAITING
        return actions + self._select_if_ready(now)

    # Clients that can't take part -------------------------------------------------------------

    def _leave_out(self, troubles: Mapping[str, str], now: float) -> list[Action]:
        new = self.pool.left_out.add(troubles)
        if not new:
            return []
        actions: list[Action] = [LeaveOut(tuple(new))]
        now_said = {c: why for c, why in new.items() if not self.cohort.waits_for(c)}
        if now_said:  # clients still waited for are reported when the attempt ends
            actions.append(PublishNotice(each_once(now_said, "excluded"), warning=True))
        return actions + self._select_if_ready(now)

    def _readmit(self, clients: tuple[str, ...], now: float) -> list[Action]:
        back = self.pool.left_out.remove(clients)
        if not back:
            return []
        self.pool.spared.difference_update(back)
        said = f"{counted(len(back))} may be selected again after a restart: {listed(back)}"
        return [Readmit(back), PublishNotice(said), *self._select_if_ready(now)]

    # Training ---------------------------------------------------------------------------------

    def _cohort(self, members: Mapping[str, Member]) -> RoundCohort:
        """Return the cohort of the current attempt."""
        return RoundCohort(self.rules, self.round, self.attempt, members, self.pool.left_out)

    def _train(self, now: float) -> list[Action]:
        self.phase = Phase.TRAINING
        self.pool.under_way = True
        self._round_deadline = now + self.rules.policy.deadline_seconds
        if self._decided:  # decided before a restart: the stored states contain the decision
            self._decided, self.cohort.deciding = False, True
            return [DecideUploads(self.round, self.attempt, ())]
        trains: list[Action] = [Train(client) for client in self.cohort.pending]
        return trains + self._go_on(now)

    def _ask_for_uploads(self, spared: Sequence[tuple[str, str]], now: float) -> list[Action]:
        """Request the updates of the members that must upload.

        The time limit is that of training, because a member that has lost its update trains again.
        """
        cohort = self.cohort
        cohort.undecided = cohort.deciding = False
        actions = cohort.spare_upload([each for each in spared if cohort.waits_for(each[0])])
        self._round_deadline = now + self.rules.policy.deadline_seconds
        actions += [Train(client) for client in cohort.pending]
        return actions + self._go_on(now)

    def _tick(self, now: float) -> list[Action]:
        if self.phase is Phase.WAITING:
            return self._select_if_ready(now)
        if self.phase is not Phase.TRAINING:
            return []
        cohort = self.cohort
        lost = [c for c in cohort.pending if not self.pool.is_present(c, now)]
        trouble = "host disconnected and did not reconnect in time"
        actions = cohort.drop(lost, MemberState.LOST, trouble)
        if now >= self._round_deadline and not cohort.deciding:
            trouble = f"no update within {self.rules.policy.deadline_seconds:g} s"
            late = cohort.training if cohort.undecided else cohort.pending
            actions += cohort.drop(late, MemberState.LATE, trouble)
        return actions + self._go_on(now)

    def _go_on(self, now: float) -> list[Action]:
        """Combine the updates or start another attempt, once the outcome of the attempt is
        known."""
        if self.phase is not Phase.TRAINING:
            return []
        cohort = self.cohort
        actions = cohort.drop_late()
        match cohort.outcome():
            case CohortOutcome.ENOUGH:
                actions += [*cohort.spare(cohort.pending), *cohort.rest()]
                self.phase = Phase.REDUCING
                actions.append(Reduce(tuple(sorted(cohort.answered))))
            case CohortOutcome.TOO_FEW:
                updates = f"{len(cohort.answered)} of the {cohort.needed} updates"
                actions += self._try_again(f"{updates} needed for a quorum", now)
            case CohortOutcome.OPEN:
                if cohort.undecided and not cohort.deciding and not cohort.training:
                    cohort.deciding = True
                    offered = tuple(cohort.pending)
                    actions.append(DecideUploads(self.round, self.attempt, offered))
        return actions

    def _without_sum(self, event: SumFailed, now: float) -> list[Action]:
        """Give up the attempt, because its secure sum failed. The next attempt avoids the clients
        that prevented the sum, if other clients suffice."""
        if self.phase not in (Phase.TRAINING, Phase.REDUCING):
            return []
        actions: list[Action] = []
        for client, trouble in event.troubles:
            member = self.cohort.members.get(client)
            if member is not None and member.state in (MemberState.SELECTED, MemberState.RECEIVED):
                actions += self.cohort.drop([client], MemberState.FAILED, trouble)
        return actions + self._try_again(event.reason, now)

    def _try_again(self, why: str, now: float) -> list[Action]:
        cohort, pool = self.cohort, self.pool
        reason = f"round {self.round}, attempt {self.attempt}: {why}"
        again, state = "trying again with a new cohort", AttemptState.FAILED
        unable = self.attempts.excuse(cohort.members.keys() & pool.left_out.troubles.keys())
        if unable:
            again = "trying again without the excluded clients; the attempt does not count"
            state = AttemptState.EXCUSED
        elif pool.lost_its_hosts(cohort):
            again = "trying again; hosts disconnected, so the attempt does not count"
            state = AttemptState.EXCUSED
        members = {client: member.state for client, member in cohort.members.items()}
        attempt = FailedAttempt(state=state, members=members)
        self.attempts.note(attempt)
        pool.spared |= attempt.to_avoid
        actions: list[Action] = [GiveUpAttempt(self.round, self.attempt, reason, state)]
        actions += cohort.abandon([*cohort.pending, *cohort.missed])
        actions += cohort.rest()
        self.cohort = self._cohort({})
        if self.attempts.used_up:
            return actions + self._end(RunEnding.FAILED, "; ".join([reason, *cohort.troubles()]))
        self.attempts.number += 1
        pool.begin(now, 0.0 if unable else self.attempts.pause())
        self.phase = Phase.WAITING
        return [
            *actions,
            PublishNotice(f"{reason}; {again}", warning=True),
            *self._select_if_ready(now),
        ]

    # Finishing --------------------------------------------------------------------------------

    def _evaluate(self) -> list[Action]:
        if not self.rules.evaluates(self.round):
            return self._commit()
        self.phase = Phase.EVALUATING
        return [Evaluate()]

    def _commit(self) -> list[Action]:
        self.phase = Phase.COMMITTING
        return [Commit(self.round, self.attempt, tuple(sorted(self.cohort.answered)))]

    def _next_round(self, now: float) -> list[Action]:
        if self._why_over or self.round == self.rules.rounds:
            return self._end(RunEnding.FINISHED, self._why_over)
        self.round += 1
        self.attempts.next_round()
        self.cohort = self._cohort({})
        self.pool.spared.clear()
        self.pool.begin(now)
        self.phase = Phase.WAITING
        return self._select_if_ready(now)

    def _end(self, ending: RunEnding, reason: str) -> list[Action]:
        self.phase = Phase.ENDED
        # Clients are instructed to stop only after the end is stored: until then, a restarted
        # coordinator would continue with them.
        still_at_work = [*self.cohort.pending, *self.cohort.missed]
        return [End(ending, reason), *self.cohort.abandon(still_at_work)]
