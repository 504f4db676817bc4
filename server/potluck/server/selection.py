"""The extension point for selectors, which choose the clients that train.

A selector derives from `Selector`. It is a pure object: no network, clock or hidden generator. Its
constructor takes its options (from the run file's `[selector]` table) as keyword arguments and only
stores them; their annotations define the valid values. The coordinator calls it from one thread at
a time; it must not block.

Clients are rows of a table, and selectors refer to them by row number. A client has the same row
during the whole run: rows are sorted by client id when the run starts, and late joiners are
appended.
"""

from __future__ import annotations

import math
import warnings
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
    """Built-in signals: data that a client can disclose once, before selection."""

    LABEL_COUNTS = "label_counts"
    TRIPLET = "triplet"
    INTERACTION_MATRIX = "interaction_matrix"


class UpdateFact(StrEnum):
    """A fact that the coordinator computes from a round's updates, if they are not masked.

    An update here means the difference of the client's parameters from the round's model, without
    running statistics.
    """

    GRAM = "gram"
    """The inner products of all pairs of updates."""
    NORM = "norm"
    """The L2 norm of each update."""
    SKETCH = "sketch"
    """A random projection of each update to `SKETCH_SIZE` numbers. The projection is the same in
    all rounds of a run. It preserves inner products and distances, with an error of about 1/16 of
    the norms."""
    OUTPUT_MOVE = "output-move"
    """Each update's change of the output layer's bias, by class. If the layer has no bias: the
    change of the mean of each row of its weights."""


SKETCH_SIZE: Final = 256


@dataclass(frozen=True, kw_only=True)
class Population:
    """The clients of a run as columns; row i of each column belongs to `ids[i]`.

    samples: K, int64, number of samples; 0 if a client has not disclosed it. label_counts: K ×
    classes, float64, possibly noisy; a row of NaN if a client sent none. triplets: K × 3, float64
    in [0, 1]: class imbalance, attribute imbalance, spurious correlation; a row of NaN if a client
    sent none. interaction_matrices: K × classes × 2, float64; NaN if a client sent none.
    label_totals: classes, float64, sum of all clients' label counts; None unless a secure sum gave
    them. signals: for each signal of another package, K × the signal's shape. A column is None if
    clients were not asked for its signal.
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
        """Return the column of a signal; None if clients were not asked for it."""
        known: NDArray[np.float64] | None = (
            getattr(self, _FIELDS[signal]) if signal in _FIELDS else self.signals.get(signal)
        )
        return known


_FIELDS: Final[Mapping[str, str]] = {
    Signal.LABEL_COUNTS: "label_counts",
    Signal.TRIPLET: "triplets",
    Signal.INTERACTION_MATRIX: "interaction_matrices",
}
"""Field of `Population` for each built-in signal."""


def by_field(columns: Mapping[str, Floats]) -> dict[str, Any]:
    """Return the arguments of `Population` for these columns, which are named by signal."""
    fields: dict[str, Any] = {_FIELDS[name]: columns[name] for name in columns if name in _FIELDS}
    return {**fields, "signals": {name: columns[name] for name in columns if name not in _FIELDS}}


@dataclass(frozen=True, kw_only=True)
class SelectionContext:
    """The facts that a selector receives to choose one round's cohort.

    round: number of the round, from 1. seed: the run's seed. count: number of clients to select;
    select all if fewer are available. available: rows of the available clients, sorted, without
    repeats. rounds: number of rounds of the run; 0 if unknown. spares: number of clients in `count`
    that the round does not wait for (`round.over_selection`). epochs: number of passes that a
    client makes over its samples. tensors: names of the parameters in updates, in order; empty
    unless the selector declares `drops_tensors`. late: rows of clients whose update for an earlier
    round is still awaited; none of them is available if the other clients suffice.
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
        """Return a new generator for this round (PCG64 of seed, round, selector)."""
        return _generator(self.seed, self.round, selector)


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A question to clients, which a selector's generator yields. The coordinator sends the
    question to the clients, and their answers into the generator.

    rows: rows of the clients to ask, without repeats, all available. kind: name of the question,
    e.g. "loss"; it is a plug-in on the hosts (`potluck.questions`). parameters: options of the
    question, JSON scalars. names: names of the requested numbers; by default one, named like the
    kind. trains: True if clients train to answer the question; hosts then receive the run's
    training settings.
    """

    rows: Rows
    kind: str
    parameters: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    names: Sequence[str] = ()
    trains: bool = False

    @property
    def wanted(self) -> tuple[str, ...]:
        """Names of the requested numbers."""
        return tuple(self.names) or (self.kind,)


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Answers of clients to an `Ask`: one row of finite numbers per client.

    rows: rows of the clients that answered, in the order asked. values: for each requested name,
    one number per client; empty arrays if no client answered.
    """

    rows: Rows
    values: Mapping[str, NDArray[np.float64]]


@dataclass(frozen=True, kw_only=True)
class AskSum:
    """A request for a secure sum of clients' label counts, for `disclosure = "unsafe-stepwise"`.

    Clients take part only if their owner allows it, because the difference of two sums over groups
    that a selector chooses may reveal a single client's counts. rows: rows of the clients to sum
    over, without repeats, all available.
    """

    rows: Rows


@dataclass(frozen=True, kw_only=True)
class Summed:
    """A secure sum. rows: rows of the clients in it; clients that were lost are missing. total: the
    summed label counts, int64, one per class; negative only with noise."""

    rows: Rows
    total: NDArray[np.int64]


Interview = Generator[Ask | AskSum, Any, "Selection"]
"""A generator that asks clients, then returns its selection. The answer to an `Ask` is an
`Answers`. The answer to an `AskSum` is a `Summed`, or None if the sum failed."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The cohort in the order chosen, and for each client in it the reason for its selection.

    quotas: cohort × classes, float64: maximum number of samples of a class that a client may train
    on, infinite if it may use all. None: no client is limited. Only if the selector declares
    `sets_quotas`.

    weights: float64 > 0: weight of each client's update. None: its number of samples. Only if the
    selector declares `sets_weights`.

    epochs: int64 ≥ 1: number of passes over its samples that each client makes. None: the run's
    number. Only if the selector declares `sets_epochs`.

    dropped: for each client, names of the tensors that its update omits, never all of them. None:
    updates have all tensors. A tensor of the round's model is the mean over the clients that sent
    it, or unchanged if none did. Only if the selector declares `drops_tensors`.
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

    round, seed: as in `SelectionContext`. rows: rows of the updates' clients, without repeats.
    samples: float64 > 0, weight of each update. steps: int64 ≥ 1, number of steps; empty if clients
    don't report it.

    gram: updates × updates. sketches: updates × `SKETCH_SIZE`. output_moves: updates × classes.
    norms: one per update, ≥ 0. These four are float64, and empty unless the selector lists them in
    `needs_facts`; a tensor that an update omits counts as a difference of 0. shares: float64 in (0,
    1], share of the model's floating-point elements that each update contains; empty if every
    update contains all of them.
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
        """Return a new generator for this round's judgement; its numbers differ from those of the
        round's selection."""
        return _generator(self.seed, self.round, f"{selector}/judge")


@dataclass(frozen=True, kw_only=True)
class MeasureMean:
    """Request of a selector to evaluate the mean of some updates as a model; the answer is a float.

    The answer is the loss on the coordinator's own evaluation data; infinite if it is not finite.
    rows: rows of the clients whose updates are averaged, without repeats; empty for the model
    before the round. weights: float64 > 0, one for each row; by default the updates' own weights.
    """

    rows: Rows
    weights: Floats | None = None


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """A selector's judgement on a round's updates.

    set_aside: rows of the clients whose update is excluded from the model, each with the reason as
    text; never all of them. values: numbers that `observe` needs, by name.
    """

    set_aside: Mapping[int, str] = field(default_factory=dict)
    values: Mapping[str, Floats] = field(default_factory=dict)


Judging = Generator[MeasureMean, float, Judgement]
"""A generator that requests losses of means of updates, then returns its judgement."""


@dataclass(frozen=True, kw_only=True)
class BeforeUpload:
    """A question about the model that a client has trained, which it answers before its upload.

    kind, parameters, names: as in `Ask`.
    """

    kind: str
    parameters: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    names: Sequence[str] = ()

    @property
    def wanted(self) -> tuple[str, ...]:
        """Names of the requested numbers."""
        return tuple(self.names) or (self.kind,)


@dataclass(frozen=True, kw_only=True)
class Offers:
    """Answers of the clients in a cohort that have finished their training.

    rows: rows of these clients, in the order chosen. values: for each name, one finite number per
    client. samples: int64 ≥ 0, number of samples on which each client reports to have trained.
    """

    rows: Rows
    values: Mapping[str, NDArray[np.float64]]
    samples: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Spared:
    """Clients that skip their upload, each with the reason; never the whole cohort."""

    rows: Rows
    reasons: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class RoundOutcome:
    """Facts about a committed round that a selector learns from.

    selected: rows of the cohort, in the order chosen, without clients that over-selection made
    unnecessary. included: rows of the clients whose update became part of the model. seconds: per
    selected client, seconds from instruction to update; NaN if no update arrived. reports: for
    "loss" and each name in the selector's `reports`, one number per selected client; NaN if no
    update arrived in time. answers: answers to the selector's questions in this round, in the order
    asked. deadline_seconds: seconds after which a client counts as failed, to estimate the
    durations of failed clients. samples: K, int64, the column of the population that the selection
    saw; 0 if unknown; empty if the selector needs no facts.

    facts: facts about the updates that arrived in time, including excluded ones; None if masked.
    judgement: the selector's judgement. spared: rows of the clients that skipped their upload, as
    the selector decided. prolonged: per selected client, its number of passes divided by the run's
    number; empty if no client has its own number. late: rows of the clients whose update for an
    earlier round became part of this model. late_seconds: for each client in `late`, seconds from
    instruction to update. cohort: rows of the whole cohort, in the order chosen; `selected` if not
    given.
    """

    round: int
    selected: Rows
    included: Rows
    seconds: NDArray[np.float64]
    reports: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    answers: Sequence[Answers] = ()
    deadline_seconds: float = math.inf
    samples: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    facts: UpdateFacts | None = None
    judgement: Judgement = field(default_factory=Judgement)
    spared: Rows = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    prolonged: Floats = field(default_factory=lambda: np.zeros(0))
    late: Rows = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    late_seconds: Floats = field(default_factory=lambda: np.zeros(0))
    cohort: Rows = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def __post_init__(self) -> None:
        """Set `cohort` to `selected` if it is not given."""
        if not len(self.cohort):
            object.__setattr__(self, "cohort", self.selected)

    @property
    def surplus(self) -> Rows:
        """Rows of the clients that over-selection made unnecessary, sorted."""
        return np.setdiff1d(self.cohort, self.selected)


_RENAMED: Final = {
    "needs": "needs_profiles",
    "asks": "asks_questions",
    "learns": "needs_facts",
    "weighs": "sets_weights",
    "limits": "sets_quotas",
    "paces": "sets_epochs",
    "drops": "drops_tensors",
}
"""Attributes of selectors by the names that they had before 0.1, which are accepted until 0.2."""


class _OldSpelling:
    """An attribute under its old name: reads and writes the attribute of the new name."""

    def __init__(self, old: str, new: str) -> None:
        self._old, self._new = old, new

    def __get__(self, selector: Selector | None, owner: type[Selector]) -> Any:
        _warn_of(self._old, self._new, owner.__name__)
        return getattr(owner if selector is None else selector, self._new)

    def __set__(self, selector: Selector, value: object) -> None:
        _warn_of(self._old, self._new, type(selector).__name__)
        object.__setattr__(selector, self._new, value)  # works for a frozen dataclass, too


def _warn_of(old: str, new: str, selector: str) -> None:
    said = f"{selector}: the attribute `{old}` of selectors is now `{new}`; rename it before 0.2"
    warnings.warn(said, FutureWarning, stacklevel=3)


class Selector(Plugin):
    """Base class of selectors: chooses each round's cohort."""

    group = SELECTORS

    def __init_subclass__(cls, **options: Any) -> None:
        """Move class attributes from their old names to the new ones, with a warning."""
        super().__init_subclass__(**options)
        for old, new in _RENAMED.items():
            if old in cls.__dict__:
                _warn_of(old, new, cls.__name__)
                setattr(cls, new, cls.__dict__[old])
                delattr(cls, old)

    needs_profiles: frozenset[str] = frozenset()
    """Signals that a client must have disclosed before it can be selected; signals of other
    packages by their entry-point names."""
    reports: frozenset[str] = frozenset()
    """Names of the numbers that clients must send with every update, e.g. "utility"."""
    asks_questions: frozenset[str] = frozenset()
    """Kinds of questions that the selector asks. A client whose owner does not allow them is
    excluded from the run before round 1. If a selector asks a kind that it does not list, a client
    whose owner does not allow it refuses the question."""
    wants_label_totals: bool = False
    """True if the selector uses `Population.label_totals`."""
    training: ClassVar[Mapping[str, object]] = {}
    """Settings of local training that the selector recommends, as in the run file's
    `[training]`."""
    needs_facts: frozenset[UpdateFact] = frozenset()
    """Facts about each round's updates that `judge` and `observe` need. They can't be computed from
    masked updates."""
    measures: bool = False
    """True if `judge` requests losses of means of updates, on the coordinator's evaluation data."""
    sets_weights: bool = False
    """True if the selector sets the updates' weights, in `Selection.weights`."""
    sets_quotas: bool = False
    """True if the selector limits each client's training samples by class, in `Selection.quotas`.
    Not allowed in masked rounds."""
    sets_epochs: bool = False
    """True if the selector sets each client's number of passes, in `Selection.epochs`. Not allowed
    in masked rounds, nor in runs that set a number of steps."""
    drops_tensors: bool = False
    """True if the selector makes clients omit tensors from updates, in `Selection.dropped`. Not
    allowed in masked rounds, nor with strategies that need whole updates."""
    most_clients: int | None = None
    """Maximum number of clients that the selector can choose among, if it compares all pairs; None
    for no maximum. A run with a larger roster is refused before it starts. If more clients join
    later, selection fails."""
    added: int = 0
    """Number of the cohort's clients that are chosen step by step, after the other clients were
    drawn uniformly."""

    def everybody(self, round_number: int) -> bool:  # noqa: ARG002  for subclasses
        """Return True if all available clients may train in a round, regardless of the number
        requested.

        `SelectionContext.count` is then the number of available clients. Not allowed in masked
        rounds.
        """
        return False

    def by_protocol(self) -> Selector | None:
        """Return a variant of this selector that makes the same choice from secure sums and
        questions; None if there is no such variant.

        Runs with `disclosure = "unsafe-stepwise"` use it.
        """
        return None

    def init(self, population: Population) -> State:  # noqa: ARG002  for subclasses
        """Return the selector's state before round 1."""
        return State()

    @abstractmethod
    def select(self, state: State, context: SelectionContext) -> Selection | Interview:
        """Return a round's cohort, or a generator that first asks clients and then returns the
        cohort."""

    def judge(
        self,
        state: State,  # noqa: ARG002  for subclasses
        facts: UpdateFacts,  # noqa: ARG002  likewise
    ) -> Judgement | Judging:
        """Return the judgement on a round's updates, or a generator that returns it.

        The generator may first request losses of means of updates. A worker thread calls this
        method when the updates have arrived, before they are weighted, and never for masked
        updates. After a restart of the coordinator it is called again with the same facts.
        """
        return Judgement()

    def before_upload(self, classes: int) -> BeforeUpload | None:  # noqa: ARG002  for subclasses
        """Return the question that clients answer after training, of a kind in `asks_questions`.

        Return None if clients send their updates immediately.
        """
        return None

    def spare(self, state: State, offers: Offers) -> Spared:  # noqa: ARG002  for subclasses
        """Return the clients that skip their upload. Called when each client of the cohort has
        answered or is lost."""
        return Spared(rows=np.zeros(0, dtype=np.int64), reasons=())

    def observe(self, state: State, outcome: RoundOutcome) -> State:  # noqa: ARG002  for subclasses
        """Return the selector's state after a committed round. Called once for each committed
        round, in order."""
        return state


def _generator(seed: int, round_number: int, purpose: str) -> np.random.Generator:
    words = (seed, round_number, zlib.crc32(purpose.encode()))
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(words)))


for _old, _new in _RENAMED.items():
    setattr(Selector, _old, _OldSpelling(_old, _new))
