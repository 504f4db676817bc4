"""The labels of metrics, with all values that each label may have.

The number of a label's values does not depend on the number of clients or hosts.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from potluck.common.disclosure import INTERACTION_MATRIX, LABEL_COUNTS, TRIPLET
from potluck.common.errors import REASONS
from potluck.common.tensors.encoding import Encoding

LATEST_RUNS = 8
"""Number of runs that have their own series: the 8 newest."""

MOST_AWAY = 20
"""Maximum number of disconnected hosts that are named for a run."""

OTHER = "OTHER"
"""Value of a label in place of every reason that this release does not know, since reasons come
from other machines."""

HETEROGENEITIES = ("gci", "gai", "gsc", "cci", "cai", "csc")
"""Names of the heterogeneity metrics: over all samples together (g), and means over the clients
(c).

They are class imbalance, attribute imbalance and spurious correlation.
"""


SPREAD_STATISTICS = ("mean", "p10", "p25", "p50", "p75", "p90", "worst_tenth")
"""Statistics of the clients' values, each client with the same weight: mean, percentiles, and the
mean of the tenth of the clients for which the measure is worst (at least two clients)."""


class MeasuredParty(StrEnum):
    """A party that has metrics."""

    COORDINATOR = "coordinator"
    HOST = "host"
    RELAY = "relay"


class RelayLeg(StrEnum):
    """One of the two connections of a relay: to its hosts, or to the coordinator."""

    HOSTS = "hosts"
    COORDINATOR = "coordinator"


class RelaySource(StrEnum):
    """Source from which a relay takes a file that a host fetches."""

    CACHE = "cache"
    COORDINATOR = "coordinator"


class DeliveryOutcome(StrEnum):
    """Outcome of an update that a relay held."""

    DELIVERED = "delivered"
    REFUSED = "refused"
    EXPIRED = "expired"


class Direction(StrEnum):
    """Direction of a file, seen from the coordinator."""

    DOWN = "down"
    UP = "up"


class TrainingWay(StrEnum):
    """How a client was trained: in a batched step with others, or alone."""

    BATCHED = "batched"
    ALONE = "alone"


class RoundPhase(StrEnum):
    """The parts of a round, in order."""

    SELECT = "select"
    ASK = "ask"
    BROADCAST = "broadcast"
    TRAIN = "train"
    COLLECT = "collect"
    REDUCE = "reduce"
    EVALUATE = "evaluate"
    COMMIT = "commit"


class AttemptOutcome(StrEnum):
    """Outcome of an attempt at a round."""

    COMMITTED = "committed"
    QUORUM_MISSED = "quorum_missed"
    ABANDONED = "abandoned"


class RunOutcome(StrEnum):
    """Outcome of a run."""

    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"


class MemberOutcome(StrEnum):
    """Outcome of a selected client.

    SELECTED counts all selected clients: its count is the sum of the other counts.
    """

    SELECTED = "selected"
    ANSWERED = "answered"
    LATE = "late"
    LOST = "lost"
    FAILED = "failed"
    SPARED = "spared"
    ABANDONED = "abandoned"


class LateOutcome(StrEnum):
    """Outcome of a training that missed its round."""

    JOINED = "joined"
    DROPPED = "dropped"


class TransferOutcome(StrEnum):
    """Outcome of an attempt to transfer a file."""

    COMPLETED = "completed"
    BROKEN = "broken"


class ProfileOutcome(StrEnum):
    """Outcome of the coordinator's request for a profile."""

    RECEIVED = "received"
    REFUSED = "refused"
    SILENT = "silent"


class DisclosureOutcome(StrEnum):
    """Answer of a client that was asked for a profile."""

    MADE = "made"
    REPEATED = "repeated"
    REFUSED = "refused"


class Work(StrEnum):
    """Kind of an instruction to a host."""

    TRAIN = "train"
    EVALUATE = "evaluate"
    DISCLOSE = "disclose"


class WorkOutcome(StrEnum):
    """Outcome of an instruction."""

    DONE = "done"
    FAILED = "failed"
    DROPPED = "dropped"


class HostStage(StrEnum):
    """Stage of an instruction on its host."""

    QUEUED = "queued"
    DOWNLOADING = "downloading"
    COMPUTING = "computing"
    UPLOADING = "uploading"


class Target(StrEnum):
    """Label distribution with which the cohort's distribution is compared."""

    BALANCED = "balanced"
    FEDERATION = "federation"


@dataclass(frozen=True, kw_only=True)
class Label:
    """A label. values: all possible values, whose series exist from the start. about: description
    of the values if they are not known beforehand."""

    name: str
    values: tuple[str, ...] = ()
    about: str = ""


RUN = Label(name="run", about=f"the run's id; the {LATEST_RUNS} runs begun last")
AWAY_HOST = Label(name="host", about=f"its name; the first {MOST_AWAY} of a run in their order")
PEER_ROLE = Label(name="role", about="host, relay or operator")
PEER = Label(name="peer", about="the role and name in the caller's certificate")
DIRECTION = Label(name="direction", values=tuple(Direction))
MEASURE_NAME = Label(name="measure", about="its name; a trainer declares 16 at most")
MASKED = "masked"
"""Value of the label `encoding` for the masked words of a secure sum."""
SUM = "sum"
"""Value of the label `encoding` for sums that hosts computed."""
ENCODING = Label(name="encoding", values=(*Encoding, MASKED, SUM))
TRAINING_WAY = Label(name="way", values=tuple(TrainingWay))
REASON = Label(name="reason", values=(*REASONS, OTHER))
SECURE_PHASE = Label(
    name="phase", values=("advertising", "sharing", "uploading", "consenting", "revealing")
)
_SIGNALS = (INTERACTION_MATRIX, LABEL_COUNTS, TRIPLET)
SIGNAL = Label(name="signal", values=(*_SIGNALS, OTHER))


def outcome(of: type[StrEnum]) -> Label:
    """Return the label `outcome` with the values of an enumeration."""
    return Label(name="outcome", values=tuple(of))


def known_signal(signal: str) -> str:
    """Return the value of a label for a signal: the signal if it is built in, else OTHER."""
    return signal if signal in _SIGNALS else OTHER


def known_reason(reason: str) -> str:
    """Return the value of a label for a reason: the reason if this release knows it, else OTHER."""
    return reason if reason in REASONS else OTHER
