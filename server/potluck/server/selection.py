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
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from potluck.common.settings.plugins import SELECTORS, Plugin
from potluck.server.state import State

Rows = NDArray[np.int64]
Floats = NDArray[np.float64]


class Signal(StrEnum):
    """The built-in signals: what a client can disclose once, before selection."""

    LABEL_COUNTS = "label_counts"
    TRIPLET = "triplet"
    INTERACTION_MATRIX = "interaction_matrix"


class UpdateFact(StrEnum):
    """Something that the coordinator reads off a round's updates, where they are not masked.

    An update is its difference from the round's model, over all parameters; running statistics
    don't count.
    """

    GRAM = "gram"
    """The inner products of all pairs of updates."""
    NORM = "norm"
    """The length of each update."""
    SKETCH = "sketch"
    """A random projection of each update to `SKETCH_SIZE` numbers, the same one all through a run:
    inner products and distances stay, to about one part in sixteen of the lengths."""
    OUTPUT_MOVE = "output-move"
    """How far each moves the output layer's bias, class by class; where that layer has none, the
    mean of each row of its weights."""


SKETCH_SIZE: Final = 256


@dataclass(frozen=True, kw_only=True)
class Population:
    """The clients of a run as columns; row i of each belongs to `ids[i]`.

    samples: K, int64; 0 where a client has not disclosed it.
    label_counts: K × classes, float64, possibly noisy; a row of NaN where a client sent none.
    triplets: K × 3, float64 in [0, 1] (CI, AI, SC); a row of NaN where a client sent none.
    interaction_matrices: K × classes × 2, float64; NaN where a client sent none.
    label_totals: classes, float64: all clients' label counts, where a secure sum gave them.
    signals: the columns of other packages' signals by name, K × the signal's shape.
    A column is None where no profile of that kind was asked for.
    """

    ids: Sequence[str]
    classes: int
    samples: NDArray[np.int64]
    label_counts: NDArray[np.float64] | None = None
    triplets: NDArray[np.float64] | None = None
    interaction_matrices: NDArray[np.float64] | None = None
    label_totals: NDArray[np.float64] | None = None
    signals: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ids)

    def disclosed(self, signal: str) -> NDArray[np.float64] | None:
        """The column of a signal; None if no profile of that kind was asked for."""
        known: NDArray[np.float64] | None = (
            getattr(self, _FIELDS[signal]) if signal in _FIELDS else self.signals.get(signal)
        )
        return known


_FIELDS: Final[Mapping[str, str]] = {
    Signal.LABEL_COUNTS: "label_counts",
    Signal.TRIPLET: "triplets",
    Signal.INTERACTION_MATRIX: "interaction_matrices",
}
"""Fields of `Population` for the built-in signals."""


def by_field(columns: Mapping[str, Floats]) -> dict[str, Any]:
    """Fields of `Population` for the columns of signals."""
    fields: dict[str, Any] = {_FIELDS[name]: columns[name] for name in columns if name in _FIELDS}
    return {**fields, "signals": {name: columns[name] for name in columns if name not in _FIELDS}}


@dataclass(frozen=True, kw_only=True)
class SelectionContext:
    """The facts a selector chooses by in one round.

    round: from 1. seed: the run's. count: how many clients to select; take all if fewer are
    available. available: rows, sorted, without repeats. rounds: how many the run has; 0 where
    that is not known. spares: how many of `count` the round does not wait for
    (`round.over_selection`). epochs: passes over its samples that a client makes. tensors: names
    of the parameters that updates have, in their order; empty unless the selector `drops` some.
    late: clients whose update for an earlier round is still awaited; none of them is available
    where others suffice.
    """

    round: int
    seed: int
    count: int
    population: Population
    available: Rows
    rounds: int = 0
    spares: int = 0
    epochs: int = 1
    tensors: Sequence[str] = ()
    late: Rows = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def generator(self, selector: str) -> np.random.Generator:
        """A fresh generator for this round (PCG64 of seed, round, selector)."""
        return _generator(self.seed, self.round, selector)


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A question to clients: the engine carries it there and sends the answers back in.

    rows: of the clients asked, without repeats, all available. kind: of the question, e.g. "loss";
    a plug-in of the clients' hosts (`potluck.questions`). parameters: its options, JSON scalars.
    names: of the numbers wanted; by default one, called like the kind. trains: whether a local
    update answers it; hosts then learn how the run trains.
    """

    rows: Rows
    kind: str
    parameters: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    names: Sequence[str] = ()
    trains: bool = False

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
    infinite where it may use all; only where the selector says that it `limits` them. None: no
    client is limited.
    weights: float64 > 0, what each client's update counts with in place of its samples; only where
    the selector says that it `weighs`. None: each counts with its samples.
    epochs: int64 ≥ 1, how many passes over its samples each client makes; only where the selector
    says that it `paces`. None: as many as the run says.
    dropped: for each client the names of tensors that its update leaves out, never all there are;
    only where the selector says that it `drops` some. A tensor of the round's model is the mean
    over those that sent it, and stays as it is where nobody did. None: updates are whole.
    """

    rows: Rows
    reasons: Sequence[str]
    quotas: NDArray[np.float64] | None = None
    weights: Floats | None = None
    epochs: NDArray[np.int64] | None = None
    dropped: Sequence[Collection[str]] | None = None


@dataclass(frozen=True, kw_only=True)
class UpdateFacts:
    """What the coordinator knows of a round's updates once they are in; one row for each.

    round, seed: as in the selection's context. rows: of their clients, without repeats. samples:
    float64 > 0, what each counts with. steps: int64 ≥ 1, as far as clients tell them. gram: updates
    × updates. sketches: updates × `SKETCH_SIZE`. output_moves: updates × classes. norms: updates,
    ≥ 0. These four are float64, and without rows unless the selector `learns` them; tensors that
    an update leaves out don't move in it. shares: float64 in (0, 1], the share of the model's
    floating-point numbers that each update has; without rows where all have all.
    """

    round: int
    seed: int
    rows: Rows
    samples: Floats
    steps: NDArray[np.int64]
    gram: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    sketches: Floats = field(default_factory=lambda: np.zeros((0, SKETCH_SIZE)))
    output_moves: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    norms: Floats = field(default_factory=lambda: np.zeros(0))
    shares: Floats = field(default_factory=lambda: np.zeros(0))

    def generator(self, selector: str) -> np.random.Generator:
        """A fresh generator for this round's judgement, another than the selection's."""
        return _generator(self.seed, self.round, f"{selector}/judge")


@dataclass(frozen=True, kw_only=True)
class MeasureMean:
    """Asks how good the mean of some updates would be as a model; answered with a float.

    The answer is the loss on the coordinator's own evaluation data, infinite where it is not
    finite. rows: of the updates' clients, without repeats; nobody for the model as it was. weights:
    float64 > 0, one for each row; by default what they count with.
    """

    rows: Rows
    weights: Floats | None = None


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What a selector makes of a round's updates.

    set_aside: rows of the clients whose update is not to become part of the model, each with the
    reason in words; never all. values: numbers for `observe`, by name.
    """

    set_aside: Mapping[int, str] = field(default_factory=dict)
    values: Mapping[str, Floats] = field(default_factory=dict)


Judging = Generator[MeasureMean, float, Judgement]
"""A judgement that has means of updates measured first."""


@dataclass(frozen=True, kw_only=True)
class BeforeUpload:
    """A question about the model that a client has trained, answered before it is sent.

    kind, parameters, names: as in `Ask`.
    """

    kind: str
    parameters: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    names: Sequence[str] = ()

    @property
    def wanted(self) -> tuple[str, ...]:
        """The names of the numbers wanted."""
        return tuple(self.names) or (self.kind,)


@dataclass(frozen=True, kw_only=True)
class Offers:
    """The answers of a cohort's clients that have trained.

    rows: of these clients, in the order chosen. values: by name, one finite number for each.
    samples: int64 ≥ 0, that each trained on, as far as it tells that.
    """

    rows: Rows
    values: Mapping[str, NDArray[np.float64]]
    samples: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Spared:
    """The clients whose updates are not wanted, and for each of them why. Not all of them."""

    rows: Rows
    reasons: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class RoundOutcome:
    """The result of a committed round.

    selected: the cohort in the order chosen. included: the clients whose update became part of the
    model. seconds: per selected client, from instruction to update; NaN where none came.
    reports: per selected client, as seconds, "loss" and what the selector's `reports` names, as it
    came with the update; NaN where none came in time.
    answers: to the questions before this cohort was chosen, in the order asked.
    deadline_seconds: the least that a client which failed has taken, as far as that is known.
    facts: of the updates that came in time, those set aside included; None where they are masked.
    judgement: the selector's own.
    spared: the clients that the selector spared their upload. prolonged: per selected client, by
    what its passes were multiplied (`Selection.epochs`); without rows where by nothing.
    late: clients whose update for an earlier round became part of this model. late_seconds: what
    each of them took, as in seconds.
    """

    round: int
    selected: Rows
    included: Rows
    seconds: NDArray[np.float64]
    reports: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    answers: Sequence[Answers] = ()
    deadline_seconds: float = math.inf
    facts: UpdateFacts | None = None
    judgement: Judgement = field(default_factory=Judgement)
    spared: Rows = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    prolonged: Floats = field(default_factory=lambda: np.zeros(0))
    late: Rows = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    late_seconds: Floats = field(default_factory=lambda: np.zeros(0))


class Selector(Plugin):
    """Chooses each round's cohort."""

    group = SELECTORS

    needs: frozenset[str] = frozenset()
    """Signals that a client must have disclosed before it can be selected; those of other packages
    by the names under which they are installed."""
    reports: frozenset[str] = frozenset()
    """Names of the numbers that are to come with every update, e.g. "utility"."""
    asks: frozenset[str] = frozenset()
    """Kinds of the questions that it asks. A client whose owner does not allow them is left out of
    the run before round 1; one that is asked otherwise refuses when it is asked."""
    wants_label_totals: bool = False
    """Whether it wants `Population.label_totals`."""
    training: ClassVar[Mapping[str, object]] = {}
    """Settings of local training that it recommends, as in the run file's `[training]`."""
    learns: frozenset[UpdateFact] = frozenset()
    """What it learns of each round's updates, in `judge` and `observe`. Not of masked ones."""
    measures: bool = False
    """Whether its judgement has means of updates measured, which needs evaluation data on the
    coordinator."""
    weighs: bool = False
    """Whether it says what updates count with, in `Selection.weights`."""
    limits: bool = False
    """Whether it says how many samples of each class a client trains on at most, in
    `Selection.quotas`. Not in masked rounds."""
    paces: bool = False
    """Whether it says how many passes each client makes, in `Selection.epochs`. Not in masked
    rounds, nor where the run counts steps."""
    drops: bool = False
    """Whether it has clients leave tensors out of their updates, in `Selection.dropped`. Not in
    masked rounds, nor beside strategies that need whole updates."""
    most_clients: int | None = None
    """The most clients that it can choose among, where it compares all with one another. A run with
    a larger roster is refused before it starts; with more that come, its selection fails."""
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

    def judge(
        self,
        state: State,  # noqa: ARG002  part of the seam
        facts: UpdateFacts,  # noqa: ARG002  likewise
    ) -> Judgement | Judging:
        """What is to become of a round's updates, or a generator that has means of them measured
        before it returns that. Called from a worker thread once they are in, before they are
        weighed; not where they are masked. After a kill it is called again, with the same facts."""
        return Judgement()

    def before_upload(self, classes: int) -> BeforeUpload | None:  # noqa: ARG002  part of the seam
        """The question that clients answer once they have trained; its kind is among `asks`. None
        where they send their updates at once."""
        return None

    def spare(self, state: State, offers: Offers) -> Spared:  # noqa: ARG002  part of the seam
        """The clients that need not send their updates, once all have answered or are lost."""
        return Spared(rows=np.zeros(0, dtype=np.int64), reasons=())

    def observe(self, state: State, outcome: RoundOutcome) -> State:  # noqa: ARG002  part of the seam
        """The state after a committed round; called once for each, in order."""
        return state


def _generator(seed: int, round_number: int, purpose: str) -> np.random.Generator:
    words = (seed, round_number, zlib.crc32(purpose.encode()))
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(words)))
