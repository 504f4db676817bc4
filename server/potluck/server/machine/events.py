"""Events that the state machine handles, and actions that it returns.

`machine.py` maps events to actions; `run/round_loop.py` supplies the events and carries out the
actions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from potluck.server.store.records import AttemptState, MemberState

STOPPED_BY_OPERATOR = "stopped by an operator"
"""Reason of a run that an operator stopped."""

# Events ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Started:
    """A run starts, or resumes after the coordinator was restarted."""


@dataclass(frozen=True)
class Joined:
    """Clients have connected. hosts: the host of each client."""

    clients: tuple[str, ...]
    hosts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Left:
    """The clients' host has disconnected."""

    clients: tuple[str, ...]


@dataclass(frozen=True)
class Excluded:
    """From the next selection on, exactly these clients must not be selected."""

    clients: tuple[str, ...]


@dataclass(frozen=True)
class StillTraining:
    """Exactly these clients still train for a closed round, from the next selection on."""

    clients: tuple[str, ...]


@dataclass(frozen=True)
class LeftOut:
    """Clients can't take part in this run. troubles: each client, with the reason."""

    troubles: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Readmitted:
    """Excluded clients may be selected again, because their host was restarted."""

    clients: tuple[str, ...]


@dataclass(frozen=True)
class Selected:
    """The selector has chosen a cohort, and the cohort is stored."""

    cohort: tuple[str, ...]


@dataclass(frozen=True)
class TooFewEligible:
    """Too few of the available clients may be selected now; more may be later."""

    reason: str


@dataclass(frozen=True)
class StoredAnswersInvalid:
    """The stored answers of an interrupted attempt are no longer valid; the attempt must start
    again."""

    reason: str


@dataclass(frozen=True)
class UpdateArrived:
    """A client's update is verified and spooled. seconds: duration of the training on a virtual
    clock."""

    client: str
    seconds: float = 0.0


@dataclass(frozen=True)
class SumArrived:
    """A sum of some clients' updates is verified and spooled.

    updates: each client, with the duration of its training on a virtual clock.
    """

    updates: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class UpdateReady:
    """A client has trained, and keeps its update until the coordinator requests it."""

    client: str


@dataclass(frozen=True)
class UploadsDecided:
    """The selector has decided which clients skip their upload. spared: each such client, with the
    reason."""

    round: int
    attempt: int
    spared: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class ClientFailed:
    """A client reported a failure, or its update was refused and won't be retried."""

    client: str
    trouble: str


@dataclass(frozen=True)
class SumFailed:
    """The attempt's secure sum has failed, so its masked updates can't be used.

    troubles: the clients that prevented the sum, with the reasons.
    """

    round: int
    attempt: int
    reason: str
    troubles: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Reduced:
    """The new model is on disk."""


@dataclass(frozen=True)
class Evaluated:
    """The new model's metrics are known."""


@dataclass(frozen=True)
class Committed:
    """The round is committed. why_over: reason why the run ends early with this round; empty if it
    does not."""

    why_over: str = ""


@dataclass(frozen=True)
class ActionFailed:
    """An action of the machine could not be carried out; the run can't continue."""

    reason: str


@dataclass(frozen=True)
class StopRequested:
    """An operator stops the run."""


@dataclass(frozen=True)
class TimerFired:
    """The time that `next_wakeup` returned has come."""


Event = (
    Started
    | Joined
    | Left
    | Excluded
    | StillTraining
    | LeftOut
    | Readmitted
    | Selected
    | TooFewEligible
    | StoredAnswersInvalid
    | UpdateArrived
    | SumArrived
    | UpdateReady
    | UploadsDecided
    | ClientFailed
    | SumFailed
    | Reduced
    | Evaluated
    | Committed
    | ActionFailed
    | StopRequested
    | TimerFired
)

# Actions --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Admit:
    """Append clients to the run's roster, in this order."""

    clients: tuple[str, ...]


@dataclass(frozen=True)
class LeaveOut:
    """Record that clients can't take part in this run."""

    clients: tuple[str, ...]


@dataclass(frozen=True)
class Readmit:
    """Record that clients can take part in this run again."""

    clients: tuple[str, ...]


@dataclass(frozen=True)
class Select:
    """Choose a cohort of `count` among the available clients; answer with Selected."""

    round: int
    attempt: int
    available: tuple[str, ...]
    count: int


@dataclass(frozen=True)
class Train:
    """Instruct a client to train."""

    client: str


@dataclass(frozen=True)
class DecideUploads:
    """Have the selector decide which clients skip their upload; answer with UploadsDecided."""

    round: int
    attempt: int
    clients: tuple[str, ...]


@dataclass(frozen=True)
class Abandon:
    """Instruct clients to stop; the round continues without them."""

    round: int
    attempt: int
    clients: tuple[str, ...]


@dataclass(frozen=True)
class MarkMember:
    """Record how a client's training in an attempt ended."""

    round: int
    attempt: int
    client: str
    state: MemberState
    trouble: str


@dataclass(frozen=True)
class GiveUpAttempt:
    """Delete the spooled updates of an attempt that can't reach its quorum. state: the attempt's
    new state."""

    round: int
    attempt: int
    reason: str
    state: AttemptState = AttemptState.ABANDONED


@dataclass(frozen=True)
class Reduce:
    """Combine the updates of these clients, in this order; answer with Reduced."""

    clients: tuple[str, ...]


@dataclass(frozen=True)
class Evaluate:
    """Evaluate the new model; answer with Evaluated."""


@dataclass(frozen=True)
class Commit:
    """Commit the round; answer with Committed."""

    round: int
    attempt: int
    included: tuple[str, ...]


@dataclass(frozen=True)
class PublishNotice:
    """Publish a notice for operators."""

    text: str
    warning: bool = False


class RunEnding(StrEnum):
    """Outcomes of a run."""

    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True)
class End:
    """End the run."""

    ending: RunEnding
    reason: str = ""


Action = (
    Admit
    | LeaveOut
    | Readmit
    | Select
    | Train
    | DecideUploads
    | Abandon
    | MarkMember
    | GiveUpAttempt
    | Reduce
    | Evaluate
    | Commit
    | PublishNotice
    | End
)
