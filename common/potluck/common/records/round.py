"""Data classes of committed rounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any, Final

from potluck.common.learning.spread import Coverage, Spread
from potluck.common.records.privacy_loss import RoundPrivacy

INCLUDED: Final = "included"
"""State of a member whose update is part of the model."""
TROUBLED: Final = frozenset({"late", "lost", "failed"})
"""States of members that could not deliver an update in time."""
LEFT_OUT: Final = TROUBLED | {"spared"}
"""States of members whose update is not part of the model."""


@dataclass(frozen=True, kw_only=True)
class RoundMember:
    """A client in a round's cohort.

    state: "included", or the reason why its update is not part of the model: "late", "lost",
    "failed" or "spared" (it skipped its upload). reason: why the selector chose the client.
    trouble: the client's error; empty if there was none. samples: number of samples, if disclosed.
    seconds: time from instruction to update. fraction: share of the client's work that was done.
    data_epoch: version of the client's data; None if unknown. software: release of Potluck on its
    host; empty if unknown.
    """

    client: str
    host: str
    state: str
    reason: str
    trouble: str
    samples: int
    seconds: float
    fraction: float = 0.0
    data_epoch: int | None = None
    software: str = ""


@dataclass(frozen=True, kw_only=True)
class JoinedUpdate:
    """An update that missed its round and became part of a later one.

    round: the round for which it was computed. weight: its weight, relative to 1 for an update that
    arrives in time.
    """

    client: str
    round: int
    weight: float


@dataclass(frozen=True, kw_only=True)
class RoundFacts:
    """The facts about a committed round that are stored, sent and shown unchanged.

    seconds: time from selection to commit. bytes_down, bytes_up: bytes of models and of updates; if
    the coordinator restarted during the round, bytes_down counts only models sent since then.
    spreads: spread of each measure over clients. coverage: numbers of clients and samples behind
    each measure, including measures that clients were asked for but none measured. committed_at:
    time of the commit; None if it was not recorded. software: version of each program and library
    of the coordinator. privacy: the run's privacy loss after the round; None without `[privacy]`.
    """

    seconds: float
    bytes_down: int
    bytes_up: int
    spreads: Mapping[str, Spread] = field(default_factory=dict)
    coverage: Mapping[str, Coverage] = field(default_factory=dict)
    committed_at: datetime | None = None
    software: Mapping[str, str] = field(default_factory=dict)
    privacy: RoundPrivacy | None = None

    @staticmethod
    def names() -> tuple[str, ...]:
        """Return the names of all facts, which are also those of their columns and messages."""
        return tuple(each.name for each in fields(RoundFacts))

    def facts(self) -> dict[str, Any]:
        """Return all facts by name, without the other fields of a subclass."""
        return {name: getattr(self, name) for name in RoundFacts.names()}


@dataclass(frozen=True, kw_only=True)
class Round(RoundFacts):
    """A committed round.

    number: number of the round, from 1. measures: measures of the new model, by name; if it was not
    evaluated, only measures of the round's trainings, such as `training_loss`. members: the cohort
    in the order of selection. model: BLAKE3 digest of the new model. late: updates from earlier
    rounds that became part of this model. sums: number of received files in which hosts had added
    up updates.
    """

    number: int
    measures: Mapping[str, float]
    members: tuple[RoundMember, ...]
    model: str
    late: tuple[JoinedUpdate, ...] = ()
    sums: int = 0

    @property
    def accuracy(self) -> float | None:
        """Share of the evaluation samples classified correctly, in [0, 1]."""
        return self.measures.get("accuracy")

    @property
    def loss(self) -> float | None:
        """Mean loss over the evaluation samples."""
        return self.measures.get("loss")

    @property
    def worst_group_accuracy(self) -> float | None:
        """Lowest accuracy of any group, in [0, 1]."""
        return self.measures.get("worst_group_accuracy")

    @property
    def cohort(self) -> tuple[str, ...]:
        """Ids of the selected clients, in the order in which they were chosen."""
        return tuple(member.client for member in self.members)

    @property
    def included(self) -> tuple[str, ...]:
        """Ids of the clients whose updates are part of the model."""
        return tuple(member.client for member in self.members if member.state == INCLUDED)

    @property
    def worst_tenths(self) -> dict[str, float]:
        """For each measure, its mean over the tenth of the clients for which it is worst."""
        return {name: each.worst_tenth for name, each in self.spreads.items()}

    @property
    def column_coverage(self) -> dict[str, Coverage]:
        """Numbers of clients and samples behind each measure and behind each `NAME_worst_tenth`."""
        tenths = {f"{name}_worst_tenth": each.coverage for name, each in self.spreads.items()}
        return {**self.coverage, **tenths}
