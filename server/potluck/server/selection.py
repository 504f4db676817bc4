"""The seam for selectors: who trains.

A selector derives from `Selector`. It is a pure object: no network, clock or hidden generator. Its
constructor takes its options (from the run file's `[selector]` table) as keyword arguments and only
stores them; their annotations say what they may be. The engine calls it from one thread at a time;
it must not block.

Clients are rows of a table. A row is a client for the whole run: rows are sorted by client id
when the run starts, late joiners are appended. A selector speaks of clients by row number.
"""

from __future__ import annotations

import math
import zlib
from abc import abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from potluck.common.settings.plugins import SELECTORS, Plugin
from potluck.server.state import State

Rows = NDArray[np.int64]
Floats = NDArray[np.float64]


class Signal(StrEnum):
    """Something a client can disclose once, before selection."""

    LABEL_COUNTS = "label_counts"
    TRIPLET = "triplet"
    INTERACTION_MATRIX = "interaction_matrix"


@dataclass(frozen=True, kw_only=True)
class Population:
    """The clients of a run as columns; row i of each belongs to `ids[i]`.

    samples: K, int64; 0 where a client has not disclosed it.
    label_counts: K × classes, float64, possibly noisy; a row of NaN where a client sent none.
    triplets: K × 3, float64 in [0, 1] (CI, AI, SC); a row of NaN where a client sent none.
    interaction_matrices: K × classes × 2, float64; NaN where a client sent none.
    label_totals: classes, float64: all clients' label counts, where a secure sum gave them.
    A column is None where no profile of that kind was asked for.
    """

    ids: Sequence[str]
    classes: int
    samples: NDArray[np.int64]
    label_counts: NDArray[np.float64] | None = None
    triplets: NDArray[np.float64] | None = None
    interaction_matrices: NDArray[np.float64] | None = None
    label_totals: NDArray[np.float64] | None = None

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, kw_only=True)
class SelectionContext:
    """The facts a selector chooses by in one round.

    round: from 1. seed: the run's. count: how many clients to select; take all if fewer are
    available. available: rows, sorted, without repeats.
    """

    round: int
    seed: int
    count: int
    population: Population
    available: Rows

    def generator(self, selector: str) -> np.random.Generator:
        """A fresh generator for this round (ALGORITHMS §0: PCG64 of seed, round, selector)."""
        words = (self.seed, self.round, zlib.crc32(selector.encode()))
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence(words)))


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A question to clients: the engine carries it there and sends the answers back in.

    rows: of the clients asked, without repeats, all available. kind: of the question, e.g. "loss";
    a plug-in of the clients' hosts (`potluck.questions`). parameters: its options, JSON scalars.
    names: of the numbers wanted; by default one, called like the kind.
    """

    rows: Rows
    kind: str
    parameters: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    names: Sequence[str] = ()

    @property
    def wanted(self) -> tuple[str, ...]:
        """The names of the numbers wanted."""
        return tuple(self.names) or (self.kind,)


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Answers of clients: one row of finite numbers each.

    rows: of the clients that answered, in the order asked. values: by name, one per row; every name
    that was wanted is there, even without answers.
    """

    rows: Rows
    values: Mapping[str, NDArray[np.float64]]


@dataclass(frozen=True, kw_only=True)
class AskSum:
    """A secure sum of clients' label counts, of the kind that is called `protocol`.

    Clients take part only where their owner allows it: sums over groups that a selector chooses
    can be told apart. rows: of the clients to sum over, without repeats, all available.
    """

    rows: Rows


@dataclass(frozen=True, kw_only=True)
class Summed:
    """A secure sum. rows: of the clients in it; some of those asked may have been lost. total:
    classes, int64; below 0 only with noise."""

    rows: Rows
    total: NDArray[np.int64]


Interview = Generator[Ask | AskSum, Any, "Selection"]
"""A selection that asks clients first. An `Ask` is answered with `Answers`, an `AskSum` with a
`Summed`, or None where there can be no sum."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The cohort in the order chosen, and for each of its clients why it was chosen.

    quotas: cohort × classes, float64: how many samples of a class a client may train on at most,
    infinite where it may use all. None: no client is limited.
    """

    rows: Rows
    reasons: Sequence[str]
    quotas: NDArray[np.float64] | None = None


@dataclass(frozen=True, kw_only=True)
class RoundOutcome:
    """The result of a committed round.

    selected: the cohort in the order chosen. included: the clients whose update became part of the
    model. seconds: per selected client, from instruction to update; NaN where none came.
    reports: per selected client, "loss" and what the selector's `reports` names, as it came with
    the update; NaN where none came.
    answers: to the questions before this cohort was chosen, in the order asked.
    deadline_seconds: the least that a client which failed has taken, as far as that is known.
    """

    round: int
    selected: Rows
    included: Rows
    seconds: NDArray[np.float64]
    reports: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    answers: Sequence[Answers] = ()
    deadline_seconds: float = math.inf


class Selector(Plugin):
    """Chooses each round's cohort."""

    group = SELECTORS

    needs: frozenset[Signal] = frozenset()
    """The profiles that a client must have disclosed before it can be selected."""
    reports: frozenset[str] = frozenset()
    """Names of the numbers that are to come with every update, e.g. "utility"."""
    asks: frozenset[str] = frozenset()
    """Kinds of the questions that it asks. A client whose owner does not allow them is left out of
    the run before round 1; one that is asked otherwise refuses when it is asked."""
    wants_label_totals: bool = False
    """Whether it wants `Population.label_totals`."""
    training: ClassVar[Mapping[str, object]] = {}
    """Settings of local training that it recommends, as in the run file's `[training]`."""
    added: int = 0
    """How many of a cohort are chosen step by step, once the others were drawn uniformly."""

    def everybody(self, round_number: int) -> bool:  # noqa: ARG002  part of the seam
        """Whether all available clients may train in a round, however many the run asks for: the
        `count` of its context is then how many there are. Not in masked rounds."""
        return False

    def by_protocol(self) -> Selector | None:
        """The selector that does the same from sums and questions (`disclosure = "protocol"`);
        None where there is none."""
        return None

    def init(self, population: Population) -> State:  # noqa: ARG002  part of the seam
        """The state before round 1."""
        return State()

    @abstractmethod
    def select(self, state: State, context: SelectionContext) -> Selection | Interview:
        """The cohort of a round, or a generator that asks before it returns one."""

    def observe(self, state: State, outcome: RoundOutcome) -> State:  # noqa: ARG002  part of the seam
        """The state after a committed round; called once for each, in order."""
        return state
