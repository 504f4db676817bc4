"""The members of an attempt at a round, and the state of each member. Has no clock."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from potluck.server.machine.events import Abandon, Action, MarkMember, PublishNotice
from potluck.server.machine.round_rules import RoundRules
from potluck.server.machine.troubles import LeftOutClients, TroubleNotices
from potluck.server.store.records import MemberState


@dataclass(kw_only=True)
class Member:
    """A client of the cohort. seconds: duration of its training on a virtual clock; infinity if the
    client became unavailable before its end."""

    state: MemberState = MemberState.SELECTED
    trouble: str = ""
    seconds: float = 0.0


class CohortOutcome(Enum):
    """State of an attempt: open, with enough updates, or unable to get enough."""

    OPEN = auto()
    ENOUGH = auto()
    TOO_FEW = auto()


class RoundCohort:
    """The cohort of one attempt. left_out: clients that can't take part in the run."""

    def __init__(
        self,
        rules: RoundRules,
        round_number: int,
        attempt: int,
        members: Mapping[str, Member],
        left_out: LeftOutClients,
    ) -> None:
        self.members = dict(members)
        """Members by client, in the order chosen."""
        self._rules = rules
        self._round = round_number
        self._attempt = attempt
        self._left_out = left_out
        self._notices = TroubleNotices()
        self.offered: set[str] = set()
        """Members that have trained and keep their update until the coordinator requests it."""
        self.undecided = rules.offers
        """True until the selector has decided which updates are wanted."""
        self.deciding = False
        """True while the selector decides."""

    def __bool__(self) -> bool:
        return bool(self.members)

    @property
    def answered(self) -> list[str]:
        """Members whose update has arrived, in the order chosen."""
        return [c for c, m in self.members.items() if m.state is MemberState.RECEIVED]

    @property
    def pending(self) -> list[str]:
        """Members whose update the round still waits for, in the order chosen."""
        return [client for client in self.members if self.waits_for(client)]

    def waits_for(self, client: str) -> bool:
        """Return True if a client is a member and the round still waits for it."""
        member = self.members.get(client)
        return member is not None and member.state is MemberState.SELECTED

    @property
    def training(self) -> list[str]:
        """Members that have neither sent nor offered an update, in the order chosen."""
        return [client for client in self.pending if client not in self.offered]

    @property
    def wanted(self) -> int:
        """The number of updates that the round waits for.

        This is at most `clients_per_round`, unless the selector chose more clients than requested.
        """
        rules, chosen = self._rules, len(self.members)
        spared = sum(member.state is MemberState.SPARED for member in self.members.values())
        everybody = chosen > rules.clients_per_round + rules.policy.over_selection
        return chosen - spared if everybody else min(rules.clients_per_round, chosen - spared)

    @property
    def needed(self) -> int:
        """The number of updates that make a quorum."""
        return self._rules.policy.needed(self.wanted)

    def outcome(self) -> CohortOutcome:
        """The state of the attempt. On a virtual clock, the attempt waits for all members."""
        answered, pending = len(self.answered), len(self.pending)
        if self.undecided and answered + pending >= self.needed:
            return CohortOutcome.OPEN
        enough = answered >= self.wanted and not self._rules.simulated
        if enough or (not pending and answered >= self.needed):
            return CohortOutcome.ENOUGH
        return CohortOutcome.OPEN if answered + pending >= self.needed else CohortOutcome.TOO_FEW

    # How a member's part ends -----------------------------------------------------------------

    def receive(self, client: str, seconds: float) -> None:
        """Record that a member's update has arrived."""
        self.members[client].state = MemberState.RECEIVED
        self.members[client].seconds = seconds

    def drop(self, clients: Iterable[str], state: MemberState, trouble: str) -> list[Action]:
        """Continue the round without these members."""
        actions: list[Action] = []
        for client in clients:
            awaited = state is MemberState.LATE and self._may_come_late(client)
            self.members[client].state = state
            self.members[client].trouble = trouble
            actions.append(MarkMember(self._round, self._attempt, client, state, trouble))
            said = self._notices.over(client, state, trouble, left_out=client in self._left_out)
            if said:
                actions.append(PublishNotice(f"round {self._round}: {said}", warning=True))
            if state is not MemberState.FAILED and not awaited:
                actions.append(Abandon(self._round, self._attempt, (client,)))
        return actions

    def drop_late(self) -> list[Action]:
        """Drop updates that missed the simulated deadline. If more than wanted remain, also drop
        the slowest."""
        if not self._rules.simulated:
            return []
        actions: list[Action] = []
        wanted, limit = self.wanted, self._rules.simulated_deadline
        for client in self.answered:
            seconds = self.members[client].seconds
            if seconds > limit:
                trouble = f"needed {seconds:.4g} simulated seconds, but the deadline is {limit:g}"
                if math.isinf(seconds):
                    trouble = "became unavailable before the end of training"
                actions += self.drop([client], MemberState.LATE, trouble)
        if not self.pending:
            ranked = sorted(self.answered, key=lambda c: (self.members[c].seconds, c))
            actions += self.spare(ranked[wanted:])
        return actions

    def spare(self, clients: Sequence[str]) -> list[Action]:
        """Continue without these members, because the round has enough updates."""
        why = "the round had enough updates without it"
        awaited = {client for client in clients if self._may_come_late(client)}
        return self.spare_upload([(client, why) for client in clients], awaited)

    def spare_upload(
        self, spared: Sequence[tuple[str, str]], awaited: Collection[str] = ()
    ) -> list[Action]:
        """Continue without the updates of these clients, which skip their upload.

        spared: each client, with the reason. awaited: the clients among them whose update may join
        a later round.
        """
        actions: list[Action] = []
        for client, why in spared:
            self.members[client].state = MemberState.SPARED
            actions.append(MarkMember(self._round, self._attempt, client, MemberState.SPARED, why))
        return actions + self.abandon([client for client, _ in spared if client not in awaited])

    def _may_come_late(self, client: str) -> bool:
        received = self.members[client].state is MemberState.RECEIVED
        return self._rules.awaits_late(received=received)

    @property
    def missed(self) -> list[str]:
        """Members that the round no longer waits for, but whose update may join a later round, in
        the order chosen."""
        if not self._rules.policy.late_updates.rounds:
            return []
        states = (MemberState.LATE, MemberState.SPARED)
        return [client for client, member in self.members.items() if member.state in states]

    def abandon(self, clients: Sequence[str]) -> list[Action]:
        """Return the action that instructs these members to stop training; nothing without
        members."""
        return [Abandon(self._round, self._attempt, tuple(clients))] if clients else []

    # What is said at the end ------------------------------------------------------------------

    def rest(self) -> list[Action]:
        """Return notices about members that have finished or failed, if they were not published
        before."""
        return [
            PublishNotice(f"round {self._round}: {text}", warning=True)
            for text in self._notices.rest()
        ]

    def troubles(self) -> list[str]:
        """Return each distinct trouble once, with the number of clients that have it."""
        return self._notices.summary()
