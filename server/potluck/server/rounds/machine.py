"""The round engine's state machine: `handle(event, now) -> actions`.

No asyncio, no grpc, no clock, no disk: `now` is any monotonic number of seconds, passed in. The
shell (`runs/driver.py`) turns what happens into events and carries the actions out. One machine is
one run; a round passes through

    waiting → selecting → training → reducing → evaluating → committing

and, when a quorum is missed, back to selecting with the next attempt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from potluck.common.runfile import LateJoiners
from potluck.server.rounds.events import (
    STOPPED_BY_OPERATOR,
    Abandon,
    Action,
    Admit,
    Broke,
    ClientFailed,
    Commit,
    Committed,
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
    MarkMember,
    Outdated,
    Readmit,
    Readmitted,
    Reduce,
    Reduced,
    RunEnding,
    Say,
    Scarce,
    Select,
    Selected,
    Started,
    StopRequested,
    SumFailed,
    Ticked,
    Train,
    UpdateArrived,
)
from potluck.server.rounds.gathering import Gathering
from potluck.server.rounds.roster import RunRoster
from potluck.server.rounds.round_rules import RoundRules
from potluck.server.rounds.troubles import Tellings, counted, each_once, listed
from potluck.server.rounds.waiting import Waiting, attempt_pause
from potluck.server.store.records import MemberState


class Phase(StrEnum):
    """What a run is doing."""

    WAITING = "waiting"
    SELECTING = "select"
    TRAINING = "train"
    REDUCING = "reduce"
    EVALUATING = "evaluate"
    COMMITTING = "commit"
    ENDED = "ended"


@dataclass(kw_only=True)
class Member:
    """A client of the cohort. seconds: what its training took on a virtual clock."""

    state: MemberState = MemberState.SELECTED
    trouble: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Resumption:
    """Where a run stood when its coordinator went down.

    available and cohort are those of the attempt that was under way; cohort maps clients in the
    order chosen to how their part had ended. Both empty if none was under way. spent: attempts at
    this round that don't count; those of a run that has failed don't. seconds: what trainings
    took whose updates are here. left_out: clients that can't take part, and why.
    """

    roster: RunRoster = field(default_factory=RunRoster)
    committed: int = 0
    attempt: int = 1
    spent: int = 0
    available: tuple[str, ...] = ()
    cohort: Sequence[tuple[str, MemberState]] = field(default_factory=tuple)
    seconds: Mapping[str, float] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)


class RoundMachine:
    """One run. Feed it events; carry out, in order, the actions it answers with."""

    def __init__(self, rules: RoundRules, resumption: Resumption | None = None) -> None:
        was = resumption or Resumption()
        self.rules = rules
        self.phase = Phase.WAITING
        self.round = was.committed + 1
        self.attempt = was.attempt
        self.spent = was.spent
        self.members: dict[str, Member] = {
            client: Member(state=state, seconds=was.seconds.get(client, 0.0))
            for client, state in was.cohort
        }
        under_way = was.committed > 0 or was.attempt > 1 or bool(was.available)
        self.gathering = Gathering(rules, was.roster, under_way=under_way)
        self.gathering.left_out.add(was.left_out)
        self._started = False
        self._stored_available = was.available
        self._refused: set[str] = set()
        self._failures = 0  # attempts in a row that came to nothing
        self._told_of_waiting = False
        self._tellings = Tellings()
        self._excused: set[str] = set()  # those whose being left out has cost an attempt
        self._round_deadline = 0.0

    # Queries ----------------------------------------------------------------------------------

    @property
    def roster(self) -> RunRoster:
        """The run's clients; the machine admits them."""
        return self.gathering.roster

    def present(self, now: float) -> tuple[str, ...]:
        """Clients that attend or may still come back, in roster order; nobody who is excluded."""
        return self.gathering.present(now)

    def is_present(self, client: str, now: float) -> bool:
        """Whether a client attends, or may still come back in time."""
        return self.gathering.is_present(client, now)

    def host_of(self, client: str) -> str:
        """The host that answers for a client, or did last; empty where none ever has."""
        return self.gathering.presence.host_of(client)

    @property
    def waiting(self) -> Waiting | None:
        """What the run waits for; None while a round is under way."""
        return self.gathering.waiting if self.phase is Phase.WAITING else None

    def away(self) -> list[str]:
        """Who of the roster does not attend."""
        return self.gathering.away()

    def next_wakeup(self) -> float | None:
        """When the machine wants a Ticked if nothing else happens; None: not at all."""
        if self.phase is Phase.WAITING and self._started:
            return self.gathering.wake
        if self.phase is not Phase.TRAINING:
            return None
        presence = self.gathering.presence
        away = [client for client in self.pending if not presence.attends(client)]
        return min([self._round_deadline, *map(presence.back_by, away)])

    @property
    def answered(self) -> list[str]:
        """Members whose update is here, in the order chosen."""
        return [c for c, m in self.members.items() if m.state is MemberState.RECEIVED]

    @property
    def pending(self) -> list[str]:
        """Members still waited for, in the order chosen."""
        return [client for client in self.members if self._is_pending(client)]

    # Events -----------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Action]:
        """What to do about an event. Events that no longer matter answer with nothing."""
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
                self.gathering.excluded = frozenset(clients)
                return self._select_if_ready(now)
            case LeftOut(troubles):
                return self._leave_out(dict(troubles), now)
            case Readmitted(clients):
                return self._readmit(clients, now)
            case Selected(cohort) if self.phase is Phase.SELECTING:
                return self._train(cohort, now)
            case Scarce(reason) if self.phase is Phase.SELECTING:
                return self._select_later(reason, now)
            case Outdated(reason) if self.phase is Phase.SELECTING:
                return self._begin_anew(reason, now)
            case UpdateArrived(client, seconds) if self._is_pending(client):
                self.members[client].state = MemberState.RECEIVED
                self.members[client].seconds = seconds
                return self._close_if_settled(now)
            case ClientFailed(client, trouble) if self._is_pending(client):
                return [
                    *self._drop(client, MemberState.FAILED, trouble),
                    *self._close_if_settled(now),
                ]
            case SumFailed(round, attempt) if (round, attempt) == (self.round, self.attempt):
                return self._without_sum(event, now)
            case Reduced() if self.phase is Phase.REDUCING:
                return self._evaluate()
            case Evaluated() if self.phase is Phase.EVALUATING:
                return self._commit()
            case Committed() if self.phase is Phase.COMMITTING:
                return self._next_round(now)
            case Broke(reason):
                return self._end(RunEnding.FAILED, reason)
            case StopRequested():
                return self._end(RunEnding.STOPPED, STOPPED_BY_OPERATOR)
            case Ticked():
                return self._tick(now)
        return []

    # Waiting ----------------------------------------------------------------------------------

    def _start(self, now: float) -> list[Action]:
        self._started = True
        if self.round > self.rules.rounds:  # killed between its last commit and its end
            return self._end(RunEnding.FINISHED, "")
        self.gathering.start(now)
        return self._go_on_training(now) if self.members else self._select_if_ready(now)

    def _go_on_training(self, now: float) -> list[Action]:
        self.phase = Phase.TRAINING
        self._round_deadline = now + self.rules.policy.deadline_seconds
        trains: list[Action] = [Train(client) for client in self.pending]
        return trains + self._close_if_settled(now)

    def _join(self, clients: tuple[str, ...], hosts: Mapping[str, str], now: float) -> list[Action]:
        self.gathering.presence.join(clients, hosts)
        roster = self.gathering.roster
        admitted = self._admit_late([c for c in clients if c not in roster]) if roster else []
        return admitted + self._select_if_ready(now)

    def _admit_late(self, clients: list[str]) -> list[Action]:
        unable = self._refused | self.gathering.left_out.troubles.keys()
        new = tuple(sorted(client for client in clients if client not in unable))
        if not new:
            return []
        if self.rules.policy.late_joiners is LateJoiners.REFUSE:
            self._refused.update(new)
            return [Say(f"{listed(new)} came too late for this run and will not be selected")]
        self.gathering.roster.append(new)
        return [Admit(new)]

    def _leave(self, clients: tuple[str, ...], now: float) -> list[Action]:
        self.gathering.presence.leave(clients, now)
        return self._tick(now)

    def _select_if_ready(self, now: float) -> list[Action]:
        if self.phase is not Phase.WAITING or not self._started:
            return []
        gathering, actions = self.gathering, list[Action]()
        if not gathering.roster:
            first = gathering.first_roster(now)
            if not first:
                return self._keep_waiting()
            gathering.roster.append(first)
            gathering.begin(now)
            actions.append(Admit(first))
        available = gathering.ready(now)
        if not available:
            return actions + self._keep_waiting()
        if self._stored_available:
            available = gathering.selectable(self._stored_available)
            if not gathering.suffices(available, self.rules.needed):
                return self._begin_anew("fewer may be selected than before the restart", now)
        self._stored_available = ()
        self._told_of_waiting = False
        self.phase = Phase.SELECTING
        count = self.rules.count + self.rules.policy.over_selection
        return [*actions, Select(self.round, self.attempt, available, count)]

    def _keep_waiting(self) -> list[Action]:
        gathering, waiting = self.gathering, self.gathering.waiting
        if gathering.given_up:
            return self._end(RunEnding.FAILED, gathering.given_up)
        if self._told_of_waiting or waiting is None or waiting.until is not None:
            return []
        self._told_of_waiting = True
        away = gathering.away()
        whom = f"; away: {listed(away)}" if away else ""
        return [Say(f"round {self.round}: {waiting.what}{whom}", warning=True)]

    def _select_later(self, reason: str, now: float) -> list[Action]:
        """Wait for a while, as for those that are away."""
        self.phase = Phase.WAITING
        if self.gathering.is_overdue(now):
            return self._end(RunEnding.FAILED, reason)
        self._failures += 1
        self.gathering.begin(now, attempt_pause(self._failures))
        return [Say(f"{reason}; trying again later", warning=True), *self._select_if_ready(now)]

    def _begin_anew(self, reason: str, now: float) -> list[Action]:
        """The next attempt, without counting this one against the policy."""
        actions: list[Action] = [GiveUpAttempt(self.round, self.attempt, reason), Say(reason)]
        self.attempt += 1
        self.spent += 1
        self._stored_available = ()
        self.phase = Phase.WAITING
        return actions + self._select_if_ready(now)

    # Clients that can't take part -------------------------------------------------------------

    def _leave_out(self, troubles: Mapping[str, str], now: float) -> list[Action]:
        new = self.gathering.left_out.add(troubles)
        if not new:
            return []
        actions: list[Action] = [LeaveOut(tuple(new))]
        told = {client: why for client, why in new.items() if not self._is_pending(client)}
        if told:  # of the others it is said when the attempt is over
            actions.append(Say(each_once(told, "left out"), warning=True))
        return actions + self._select_if_ready(now)

    def _readmit(self, clients: tuple[str, ...], now: float) -> list[Action]:
        back = self.gathering.left_out.remove(clients)
        if not back:
            return []
        self.gathering.spared.difference_update(back)
        said = f"{counted(len(back))} may be selected again, started anew: {listed(back)}"
        return [Readmit(back), Say(said), *self._select_if_ready(now)]

    # Training ---------------------------------------------------------------------------------

    def _train(self, cohort: tuple[str, ...], now: float) -> list[Action]:
        self.phase = Phase.TRAINING
        self.gathering.under_way = True
        self.members = {client: Member() for client in cohort}
        self._tellings = Tellings()
        self._round_deadline = now + self.rules.policy.deadline_seconds
        trains: list[Action] = [Train(client) for client in cohort]
        return trains + self._close_if_settled(now)

    def _tick(self, now: float) -> list[Action]:
        if self.phase is Phase.WAITING:
            return self._select_if_ready(now)
        if self.phase is not Phase.TRAINING:
            return []
        actions: list[Action] = []
        for client in self.pending:
            if not self.is_present(client, now):
                trouble = "its host went away and did not come back in time"
                actions += self._drop(client, MemberState.LOST, trouble)
        if now >= self._round_deadline:
            seconds = self.rules.policy.deadline_seconds
            for client in self.pending:
                trouble = f"no update within {seconds:g} s"
                actions += self._drop(client, MemberState.LATE, trouble)
        return actions + self._close_if_settled(now)

    def _drop(self, client: str, state: MemberState, trouble: str) -> list[Action]:
        self.members[client].state = state
        self.members[client].trouble = trouble
        actions: list[Action] = [MarkMember(self.round, self.attempt, client, state, trouble)]
        said = self._tellings.over(
            client, state, trouble, left_out=client in self.gathering.left_out
        )
        if said:
            actions.append(Say(f"round {self.round}: {said}", warning=True))
        if state is not MemberState.FAILED:
            actions.append(Abandon(self.round, self.attempt, (client,)))
        return actions

    def _close_if_settled(self, now: float) -> list[Action]:
        if self.phase is not Phase.TRAINING:
            return []
        wanted = min(self.rules.count, len(self.members))
        actions = self._too_late(wanted) if self.rules.simulated else []
        answered, pending = len(self.answered), len(self.pending)
        needed = self.rules.policy.needed(wanted)
        enough = answered >= wanted and not self.rules.simulated
        if enough or (not pending and answered >= needed):
            return actions + self._reduce()
        if answered + pending < needed:
            return actions + self._retry(answered, needed, now)
        return actions

    def _too_late(self, wanted: int) -> list[Action]:
        """Drop those past the simulated deadline, and the slowest beyond those wanted."""
        actions: list[Action] = []
        limit = self.rules.simulated_deadline
        for client in self.answered:
            if self.members[client].seconds > limit:
                trouble = f"{self.members[client].seconds:.4g} simulated seconds, of {limit:g}"
                actions += self._drop(client, MemberState.LATE, trouble)
        if not self.pending:
            ranked = sorted(
                self.answered, key=lambda client: (self.members[client].seconds, client)
            )
            actions += self._spare(ranked[wanted:])
        return actions

    def _spare(self, clients: Sequence[str]) -> list[Action]:
        """The round has enough updates without these."""
        actions: list[Action] = []
        for client in clients:
            self.members[client].state = MemberState.SPARED
            why = "the round had enough updates without it"
            actions.append(MarkMember(self.round, self.attempt, client, MemberState.SPARED, why))
        if clients:
            actions.append(Abandon(self.round, self.attempt, tuple(clients)))
        return actions

    def _reduce(self) -> list[Action]:
        actions = [*self._spare(self.pending), *self._tell_the_rest()]
        self.phase = Phase.REDUCING
        return [*actions, Reduce(tuple(sorted(self.answered)))]

    def _tell_the_rest(self) -> list[Action]:
        rest = self._tellings.rest()
        return [Say(f"round {self.round}: {text}", warning=True) for text in rest]

    def _retry(self, answered: int, needed: int, now: float) -> list[Action]:
        return self._try_again(f"{answered} of the {needed} updates needed for a quorum", now)

    def _without_sum(self, event: SumFailed, now: float) -> list[Action]:
        """Give the attempt up; next time without those that were in the way, if others suffice."""
        if self.phase not in (Phase.TRAINING, Phase.REDUCING):
            return []
        actions: list[Action] = []
        for client, trouble in event.troubles:
            member = self.members.get(client)
            if member is not None and member.state in (MemberState.SELECTED, MemberState.RECEIVED):
                actions += self._drop(client, MemberState.FAILED, trouble)
        return actions + self._try_again(event.reason, now)

    def _try_again(self, why: str, now: float) -> list[Action]:
        reason = f"round {self.round}, attempt {self.attempt}: {why}"
        actions: list[Action] = [GiveUpAttempt(self.round, self.attempt, reason)]
        if self.pending:
            actions.append(Abandon(self.round, self.attempt, tuple(self.pending)))
        again = "trying again with a new cohort"
        to_spare = {MemberState.FAILED, MemberState.LOST, MemberState.LATE}
        unable = self.members.keys() & self.gathering.left_out.troubles.keys() - self._excused
        if unable:
            again = "trying again without those left out; the attempt does not count"
            self._excused |= unable
            self.spent += 1
        elif self._lost_its_hosts():
            again = "trying again; hosts went away, so the attempt does not count"
            self.spent += 1
            to_spare.remove(MemberState.LOST)  # once they are back they are as good as others
        self.gathering.spared |= {
            client for client, member in self.members.items() if member.state in to_spare
        }
        actions += self._tell_the_rest()
        troubles = self._tellings.summary()
        self.members = {}
        if self.attempt - self.spent >= self.rules.policy.attempts:
            return actions + self._end(RunEnding.FAILED, "; ".join([reason, *troubles]))
        self.attempt += 1
        self._failures += not unable
        self.gathering.begin(now, 0.0 if unable else attempt_pause(self._failures))
        self.phase = Phase.WAITING
        return [
            *actions,
            Say(f"{reason}; {again}", warning=True),
            *self._select_if_ready(now),
        ]

    def _lost_its_hosts(self) -> bool:
        """Whether the cohort was large enough, and is too small without those that went away."""
        there = [
            client
            for client, member in self.members.items()
            if member.state is not MemberState.LOST and self.gathering.presence.attends(client)
        ]
        needed = self.rules.policy.needed(min(self.rules.count, len(self.members)))
        suffices = self.gathering.suffices
        return suffices(tuple(self.members), needed) and not suffices(there, needed)

    # Finishing --------------------------------------------------------------------------------

    def _evaluate(self) -> list[Action]:
        if not self.rules.evaluates(self.round):
            return self._commit()
        self.phase = Phase.EVALUATING
        return [Evaluate()]

    def _commit(self) -> list[Action]:
        self.phase = Phase.COMMITTING
        return [Commit(self.round, self.attempt, tuple(sorted(self.answered)))]

    def _next_round(self, now: float) -> list[Action]:
        if self.round == self.rules.rounds:
            return self._end(RunEnding.FINISHED, "")
        self.round += 1
        self.attempt = 1
        self.spent = 0
        self.members = {}
        self._failures = 0
        self.gathering.spared.clear()
        self.gathering.begin(now)
        self.phase = Phase.WAITING
        return self._select_if_ready(now)

    def _end(self, ending: RunEnding, reason: str) -> list[Action]:
        self.phase = Phase.ENDED
        actions: list[Action] = [End(ending, reason)]
        if self.pending:  # told to stop only now: a run whose end is not stored goes on with them
            actions.append(Abandon(self.round, self.attempt, tuple(self.pending)))
        return actions

    def _is_pending(self, client: str) -> bool:
        member = self.members.get(client)
        return member is not None and member.state is MemberState.SELECTED
