"""Committed rounds as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape

from potluck.common.learning.coverage import Coverage
from potluck.common.learning.spread import QUANTILES
from potluck.deploy.operator.run_view import (
    all_metrics,
    coverage_of,
    member_state_name,
    spread_coverage,
)
from potluck.deploy.view.readable import readable_coverage
from potluck.rpc.v1 import operator_pb2

INCLUDED = "included"
"""State of a member whose update is part of the model."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """A client in a round's cohort.

    state: "included", or why not: "late", "lost", "failed" or "spared". reason: why the selector
    chose it. trouble: what went wrong, else empty. samples: as far as disclosed. seconds: from
    instruction to update.
    """

    client: str
    host: str
    state: str
    reason: str
    trouble: str
    samples: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A measure over clients, each of which counts once.

    worst_tenth: mean over the tenth for which it is worst. quantiles: by the share of the clients
    below. coverage: the clients and samples that it is over.
    """

    clients: int
    mean: float
    worst_tenth: float
    quantiles: Mapping[float, float]
    coverage: Coverage


@dataclass(frozen=True, kw_only=True)
class Round:
    """A committed round.

    number: from 1. measures: of the new model, by name; where it was not evaluated, at most of the
    round's trainings, such as `training_loss`. members: the cohort in the order it was chosen.
    seconds: from selection to commit. bytes_down, bytes_up: of models and updates. model: BLAKE3
    digest of the new model. coverage: clients and samples behind each measure, by name; also of
    measures that clients were asked for and that none of them measured.
    """

    number: int
    measures: Mapping[str, float]
    spreads: Mapping[str, Spread]
    members: tuple[Member, ...]
    seconds: float
    bytes_down: int
    bytes_up: int
    model: str
    coverage: Mapping[str, Coverage] = field(default_factory=dict)

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
        """Accuracy of the group with the lowest, in [0, 1]."""
        return self.measures.get("worst_group_accuracy")

    @property
    def cohort(self) -> tuple[str, ...]:
        """Ids of the clients selected, in the order they were chosen."""
        return tuple(member.client for member in self.members)

    @property
    def included(self) -> tuple[str, ...]:
        """Ids of the clients whose updates are part of the model."""
        return tuple(member.client for member in self.members if member.state == INCLUDED)

    def _over(self, measure: str) -> str:
        """The clients and samples behind a measure, in words; empty if they are not known."""
        return readable_coverage(self.coverage[measure]) if measure in self.coverage else ""

    def _repr_html_(self) -> str:
        measured = "".join(
            f"<tr><td>{escape(name)}</td><td>{value:.4g}</td><td>{self._over(name)}</td></tr>"
            for name, value in sorted(self.measures.items())
        )
        rows = "".join(
            f"<tr><td>{escape(member.client)}</td><td>{escape(member.state)}</td>"
            f"<td>{escape(member.reason)}</td></tr>"
            for member in self.members
        )
        return (
            f"<p><b>round {self.number}</b>, {self.seconds:.2g} s</p>"
            f"<table>{measured}</table>"
            f"<table><tr><th>client</th><th>state</th><th>why</th></tr>{rows}</table>"
        )


def round_of(committed: operator_pb2.CommittedRound) -> Round:
    """The round that a message tells of."""
    return Round(
        number=committed.round,
        measures=all_metrics(committed.metrics),
        spreads={name: _spread(each) for name, each in sorted(committed.spreads.items())},
        members=tuple(_member(member) for member in committed.members),
        seconds=committed.seconds,
        bytes_down=committed.bytes_down,
        bytes_up=committed.bytes_up,
        model=committed.model_blake3,
        coverage=coverage_of(committed),
    )


def _spread(spread: operator_pb2.Spread) -> Spread:
    return Spread(
        clients=spread.clients,
        mean=spread.mean,
        worst_tenth=spread.worst_tenth,
        quantiles=dict(zip(QUANTILES, spread.quantiles, strict=False)),
        coverage=spread_coverage(spread),
    )


def _member(member: operator_pb2.Member) -> Member:
    return Member(
        client=member.client_id,
        host=member.host_id,
        state=member_state_name(member.state),
        reason=member.reason,
        trouble=member.trouble,
        samples=member.samples,
        seconds=member.seconds,
    )
