"""The events that the state machine takes, and the actions that it answers with.

`machine.py` turns one into the other; `runs/round_loop.py` brings the events and
carries the actions out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from potluck.server.store.records import MemberState

STOPPED_BY_OPERATOR = "stopped by an operator"
"""The reason of a run that was stopped."""

# Events ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Started:
    """The run starts, or resumes after a restart."""


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
    """From the next selection on, these clients and no others may not be selected."""

    clients: tuple[str, ...]


@dataclass(frozen=True)
class StillTraining:
    """From the next selection on, these clients and no others are at work on an update for a round
    that is closed."""

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
    """The selector has chosen, and the cohort is stored."""

    cohort: tuple[str, ...]


@dataclass(frozen=True)
class TooFewEligible:
    """Too few of the available clients are eligible; more may be eligible later."""

    reason: str


@dataclass(frozen=True)
class StoredAnswersInvalid:
    """Answers from before a restart are no longer valid; the attempt must start again."""

    reason: str


@dataclass(frozen=True)
class UpdateArrived:
    """A client's update is verified and spooled. seconds: its duration on a virtual clock."""

    client: str
    seconds: float = 0.0


@dataclass(frozen=True)
class SumArrived:
    """A sum of some clients' updates is verified and spooled; they are in it together.

    updates: each client, and what its training took on a virtual clock.
    """

    updates: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class UpdateReady:
    """A client has trained, and keeps its update until it is asked for."""

    client: str


@dataclass(frozen=True)
class UploadsDecided:
    """The selector has decided which clients need not upload. spared: each, with the reason."""

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
    """The attempt has no secure sum, so its masked updates are of no use.

    troubles: of the clients that prevented it.
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
    """The round is committed. why_over: the reason why it is the last one, though more were to
    come; empty otherwise."""

    why_over: str = ""


@dataclass(frozen=True)
class ActionFailed:
    """An action could not be carried out; the run can't continue."""

    reason: str


@dataclass(frozen=True)
class StopRequested:
    """An operator stops the run."""


@dataclass(frozen=True)
class TimerFired:
    """Time has passed; see `next_wakeup`."""


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
    """Record that they can again."""

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
    """Have the selector decide which of these clients need not upload; answer with
    UploadsDecided."""

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
    """Record how a client's part in an attempt ended."""

    round: int
    attempt: int
    client: str
    state: MemberState
    trouble: str


@dataclass(frozen=True)
class GiveUpAttempt:
    """The attempt can't reach its quorum: drop what it spooled."""

    round: int
    attempt: int
    reason: str


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
    """Something a person should know."""

    text: str
    warning: bool = False


class RunEnding(StrEnum):
    """How a run ends."""

    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True)
class End:
    """The run is over."""

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
