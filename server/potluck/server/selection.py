"""The extension point for selectors, which choose the clients that train.

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
    """A fact that the coordinator computes from a round's updates, if they are not masked.

    An update is its difference from the round's model, over all parameters; running statistics are
    not included.
    """

    GRAM = "gram"
    """The inner products of all pairs of updates."""
    NORM = "norm"
    """The length of each update."""
    SKETCH = "sketch"
    """A random projection of each update to `SKETCH_SIZE` numbers, the same one all through a run:
    inner products and distances stay, to about one part in sixteen of the lengths."""
    OUTPUT_MOVE = "output-move"
    """How far each moves the output layer's bias, class by class; if that layer has none, the
    mean of each row of its weights."""


SKETCH_SIZE: Final = 256


@dataclass(frozen=True, kw_only=True)
class Population:
    """The clients of a run as columns; row i of each belongs to `ids[i]`.

    samples: K, int64; 0 if a client has not disclosed it.
    label_counts: K × classes, float64, possibly noisy; a row of NaN if a client sent none.
    triplets: K × 3, float64 in [0, 1] (CI, AI, SC); a row of NaN if a client sent none.
    interaction_matrices: K × classes × 2, float64; NaN if a client sent none.
    label_totals: classes, float64: all clients' label counts, if a secure sum gave them.
    signals: the columns of other packages' signals by name, K × the signal's shape.
    A column is None if no profile of that kind was asked for.
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
    """The facts from which a selector chooses one round's cohort.

    round: from 1. seed: the run's. count: number of clients to select; select all if fewer are
    available. available: rows, sorted, without repeats. rounds: number of rounds of the run; 0 if
    unknown. spares: how many of `count` the round does not wait for (`round.over_selection`).
    epochs: passes over its samples that a client makes. tensors: names of the parameters that
    updates have, in their order; empty unless the selector `drops` some. late: clients whose update
    for an earlier round is still awaited; none of them is available if the others suffice.
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
    """A secure sum of clients' label counts, of the kind that settings call `unsafe-stepwise`.

    Clients take part only if their owner allows it, because the difference of two sums over groups
    that a selector chooses may reveal a single client's counts. rows: of the clients to sum over,
    without repeats, all available.
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
`Summed`, or None if a sum is impossible."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The cohort in the order chosen, and for each of its clients why it was chosen.

    quotas: cohort × classes, float64: how many samples of a class a client may train on at most,
    infinite if it may use all; only if the selector declares that it `limits` them. None: no client
    is limited.
    weights: float64 > 0, the weight of each client's update in place of its samples; only if the
    selector declares that it `weighs`. None: each update is weighted by its samples.
    epochs: int64 ≥ 1, number of passes over its samples that each client makes; only if the
    selector declares that it `paces`. None: the run's number.
    dropped: for each client the names of tensors that its update omits, never all of them; only if
    the selector declares that it `drops` some. A tensor of the round's model is the mean over the
    clients that sent it, or unchanged if none did. None: updates are whole.
    """

    rows: Rows
    reasons: Sequence[str]
    quotas: NDArray[np.float64] | None = None
    weights: Floats | None = None
    epochs: NDArray[np.int64] | None = None
    dropped: Sequence[Collection[str]] | None = None


@dataclass(frozen=True, kw_only=True)
class UpdateFacts:
    """Facts about a round's updates that the coordinator has received; one row per update.

    round, seed: as in the selection's context. rows: of their clients, without repeats. samples:
    float64 > 0, the weight of each update. steps: int64 ≥ 1, as far as clients report them. gram:
    updates × updates. sketches: updates × `SKETCH_SIZE`. output_moves: updates × classes. norms:
    updates, ≥ 0. These four are float64, and have no rows unless the selector `learns` them;
    tensors that an update omits have a delta of 0. shares: float64 in (0, 1], the share of the
    model's floating-point numbers that each update has; no rows if every update has all of them.
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
    """Request to evaluate the mean of some updates as a model; answered with a float.

    The answer is the loss on the coordinator's own evaluation data, infinite if it is not finite.
    rows: of the updates' clients, without repeats; empty for the model before the round. weights:
    float64 > 0, one for each row; by default the updates' own weights.
    """

    rows: Rows
    weights: Floats | None = None


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """A selector's verdict on a round's updates.

    set_aside: rows of the clients whose update must not become part of the model, each with the
    reason in words; never all. values: numbers for `observe`, by name.
    """

    set_aside: Mapping[int, str] = field(default_factory=dict)
    values: Mapping[str, Floats] = field(default_factory=dict)


Judging = Generator[MeasureMean, float, Judgement]
"""A generator that has means of updates measured and then returns its judgement."""


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
    samples: int64 ≥ 0, number that each trained on, as far as it reports it.
    """

    rows: Rows
    values: Mapping[str, NDArray[np.float64]]
    samples: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Spared:
    """Clients that need not upload, each with the reason; never the whole cohort."""

    rows: Rows
    reasons: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class RoundOutcome:
    """The result of a committed round.

    selected: the cohort in the order chosen. included: the clients whose update became part of the
    model. seconds: per selected client, from instruction to update; NaN if none came.
    reports: per selected client, as seconds, "loss" and what the selector's `reports` names, as it
    came with the update; NaN if none came in time.
    answers: to the questions before this cohort was chosen, in the order asked.
    deadline_seconds: the minimum time that a failed client has taken, as far as it is known.
    facts: of the updates that came in time, those set aside included; None if they are masked.
    judgement: the selector's own.
    spared: the clients that the selector spared their upload. prolonged: per selected client, the
    factor on its passes (`Selection.epochs`); no rows if no client has one.
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
    """Names of the numbers that clients must send with every update, e.g. "utility"."""
    asks: frozenset[str] = frozenset()
    """Kinds of the questions that it asks. A client whose owner does not allow them is excluded
    from the run before round 1. If a selector asks a kind that it does not list, such a
    client refuses the question."""
    wants_label_totals: bool = False
    """True if it uses `Population.label_totals`."""
    training: ClassVar[Mapping[str, object]] = {}
    """Settings of local training that it recommends, as in the run file's `[training]`."""
    learns: frozenset[UpdateFact] = frozenset()
    """Facts of each round's updates that `judge` and `observe` get. Masked updates have none."""
    measures: bool = False
    """True if `judge` has means of updates evaluated, on evaluation data of the coordinator."""
    weighs: bool = False
    """True if it sets the updates' weights, in `Selection.weights`."""
    limits: bool = False
    """True if it sets the maximum number of samples of each class that a client trains on, in
    `Selection.quotas`. Not for masked rounds."""
    paces: bool = False
    """True if it sets each client's number of passes over its samples, in `Selection.epochs`. Not
    for masked rounds, nor for runs that count steps."""
    drops: bool = False
    """True if it makes clients omit tensors from their updates, in `Selection.dropped`. Not for
    masked rounds, nor with strategies that need whole updates."""
    most_clients: int | None = None
    """Maximum number of clients that it can choose among, for selectors that compare all pairs. A
    run with a larger roster is refused before it starts. If more clients join later, selection
    fails."""
    added: int = 0
    """Number of the cohort's clients that are chosen step by step, after a uniform draw of the
    others."""

    def everybody(self, round_number: int) -> bool:  # noqa: ARG002  part of the seam
        """Return True if all available clients may train in a round, whatever the run's count.

        The `count` of the context is then the number of available clients. Not for masked rounds.
        """
        return False

    def by_protocol(self) -> Selector | None:
        """Return the selector that does the same from sums and questions; None if there is none.

        Runs with `disclosure = "unsafe-stepwise"` use it.
        """
        return None

    def init(self, population: Population) -> State:  # noqa: ARG002  part of the seam
        """Return the state before round 1."""
        return State()

    @abstractmethod
    def select(self, state: State, context: SelectionContext) -> Selection | Interview:
        """Return a round's cohort, or a generator that first asks clients, then returns it."""

    def judge(
        self,
        state: State,  # noqa: ARG002  part of the seam
        facts: UpdateFacts,  # noqa: ARG002  likewise
    ) -> Judgement | Judging:
        """Return the judgement on a round's updates, or a generator that returns it.

        The generator may have means of updates measured first. A worker thread calls this method
        once the updates are in, before they are weighed, and never for masked updates. After the
        coordinator was killed, it is called again with the same facts.
        """
        return Judgement()

    def before_upload(self, classes: int) -> BeforeUpload | None:  # noqa: ARG002  part of the seam
        """Return the question that clients answer after training; its kind is among `asks`.

        None if clients send their updates at once.
        """
        return None

    def spare(self, state: State, offers: Offers) -> Spared:  # noqa: ARG002  part of the seam
        """Return the clients that need not upload; called once all answered or are lost."""
        return Spared(rows=np.zeros(0, dtype=np.int64), reasons=())

    def observe(self, state: State, outcome: RoundOutcome) -> State:  # noqa: ARG002  part of the seam
        """Return the state after a committed round. Called once for each, in order."""
        return state


def _generator(seed: int, round_number: int, purpose: str) -> np.random.Generator:
    words = (seed, round_number, zlib.crc32(purpose.encode()))
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(words)))
