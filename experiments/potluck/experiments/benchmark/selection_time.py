"""Seconds that a selection among many clients takes, measured with made-up profiles, answers and
past rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from potluck.common.learning.heterogeneity import triplets
from potluck.server.selection import (
    SKETCH_SIZE,
    Answers,
    Ask,
    Floats,
    Interview,
    Judgement,
    Population,
    RoundOutcome,
    Rows,
    Selection,
    SelectionContext,
    Selector,
    UpdateFact,
    UpdateFacts,
)
from potluck.server.state import State

CLASSES = 10


def profiles(clients: int) -> Population:
    """Return clients with labels by Dirichlet(0.3) and two attributes, 20 to 500 samples each."""
    generator = np.random.default_rng(0)
    samples = generator.integers(20, 500, clients)
    shares = generator.standard_gamma(0.3, (clients, CLASSES)) + 1e-12
    counts = np.floor(shares / shares.sum(axis=1, keepdims=True) * samples[:, None])
    with_attribute = np.floor(counts * generator.random((clients, CLASSES)))
    matrices = np.stack([with_attribute, counts - with_attribute], axis=2)
    return Population(
        ids=[f"k{row}" for row in range(clients)],
        classes=CLASSES,
        samples=counts.sum(axis=1).astype(np.int64),
        label_counts=counts,
        triplets=triplets(matrices),
        interaction_matrices=matrices,
    )


def played(selecting: Selection | Interview, number: int) -> tuple[Selection, Sequence[Answers]]:
    """Return the selection of a round, and the answers to the questions before it.

    All clients answer with numbers from 0.5 to 1.5.
    """
    if isinstance(selecting, Selection):
        return selecting, ()
    generator, answers = np.random.default_rng(number), list[Answers]()
    try:
        ask = next(selecting)
        while True:
            if not isinstance(ask, Ask):
                raise TypeError("a selector that asks for secure sums can't be measured")
            values = {name: generator.uniform(0.5, 1.5, len(ask.rows)) for name in ask.wanted}
            answers.append(Answers(rows=ask.rows, values=values))
            ask = selecting.send(answers[-1])
    except StopIteration as ended:
        return ended.value, answers


def seconds_per_round(
    selector: Selector,
    population: Population,
    count: int,
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the shortest total time of `select` and `observe`, over the first rounds of a run.

    The outcomes have neither reports nor facts, so a selector that learns from them chooses as at
    the start of a run.
    """
    everybody = np.arange(len(population))
    state = selector.init(population)
    times = []
    for number in range(1, rounds + 1):
        context = SelectionContext(
            round=number, seed=1, count=count, population=population, available=everybody
        )
        begin = clock()
        selection, answers = played(selector.select(state, context), number)
        outcome = RoundOutcome(
            round=number,
            selected=selection.rows,
            included=selection.rows,
            seconds=np.ones(len(selection.rows)),
            answers=answers,
        )
        state = selector.observe(state, outcome)
        times.append(clock() - begin)
        if len(selection.rows) != min(count, len(population)):
            raise ValueError(f"{len(selection.rows)} of {count} clients were selected")
    return min(times)


# Selections of a selector that has learned about all clients -------------------------------------

COUNT = 100
"""Number of clients that a measured selection chooses."""

LONGEST_SECONDS = 60.0
"""Maximum expected processor seconds of a selection, and of all rounds before it together; a longer
one is not measured."""
LARGEST_STATE = 8e9
"""Maximum expected bytes of a selector's state; a selector with a larger one is not measured."""

_LARGE_ROUNDS = 20
"""Minimum number of large rounds, which together have each client once."""
_MOST_PAIRS = 1_000
"""Maximum number of clients in a large round if the selector needs inner products of all pairs."""
_OBSERVED, _TIMED = 2, 5
"""Numbers of the last rounds before a measurement, and of the measured rounds."""
_UPDATE_PARTS = 32
"""Number of dimensions of made-up updates, of which inner products are computed."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurements of a selector.

    selecting: shortest processor seconds of `select`, over the measured rounds. learning: processor
    seconds of all rounds before these. state_bytes: size of the arrays in the selector's state.
    """

    selecting: float
    learning: float
    state_bytes: int


class PastRounds:
    """Rounds of a selector with made-up outcomes, in which all selected clients succeed.

    Durations are 0.01 to 0.1 s per sample. Answers, reports and norms of updates are from 0.5 to
    1.5. Sketches, changes of the output layer and the updates behind inner products are normally
    distributed.

    Raises TypeError if the selector asks for secure sums, requests losses of means of updates, or
    lets clients skip uploads: these can't be made up.
    """

    def __init__(self, selector: Selector, population: Population) -> None:
        if selector.measures or selector.before_upload(population.classes) is not None:
            raise TypeError("a selector that needs losses or skips uploads can't be measured")
        self.state: State = selector.init(population)
        self._selector, self._population = selector, population
        self._everybody = np.arange(len(population))
        self._rounds = 0
        self._asked: list[tuple[str, ...]] = []

    def select(self, count: int) -> float:
        """Select clients, let the selector observe the round, and return the processor seconds of
        the selection alone.

        Raises ValueError if the selector chooses another number of clients.
        """
        context = SelectionContext(
            round=self._rounds + 1,
            seed=1,
            count=count,
            population=self._population,
            available=self._everybody,
        )
        begin = time.process_time()
        selection, answers = played(self._selector.select(self.state, context), context.round)
        seconds = time.process_time() - begin
        if len(selection.rows) != min(count, len(self._population)):
            raise ValueError(f"{len(selection.rows)} of {count} clients were selected")
        self._asked = [tuple(each.values) for each in answers] or self._asked
        self._observe(selection, answers)
        return seconds

    def include_all(self) -> None:
        """Let the selector observe large rounds, until each client has trained once more.

        The clients of these rounds are drawn at random, not selected. They answer what the selector
        asked in the rounds before. A client's weight is its number of samples. If the selector sets
        weights, it is that number relative to the mean, over the probability of being in the round.
        """
        clients = len(self._population)
        size = -(-clients // _LARGE_ROUNDS)
        if UpdateFact.GRAM in self._selector.needs_facts:
            size = min(size, _MOST_PAIRS)
        order = np.random.default_rng(1).permutation(clients)
        weights = self._population.samples.astype(np.float64)
        if self._selector.sets_weights:
            weights *= clients / size / weights.mean()
        for begin in range(0, clients, size):
            rows = order[begin : begin + size]
            generator = np.random.default_rng(self._rounds)
            answers = [
                Answers(rows=rows, values={name: _typical(generator, rows) for name in names})
                for names in self._asked
            ]
            self._observe(Selection(rows=rows, reasons=(), weights=weights[rows]), answers)

    def _observe(self, selection: Selection, answers: Sequence[Answers]) -> None:
        """Let the selector judge and observe a round with this cohort."""
        self._rounds += 1
        selector, rows = self._selector, selection.rows
        generator = np.random.default_rng((self._rounds, 1))
        facts = self._facts(selection, generator)
        judgement = selector.judge(self.state, facts)
        if isinstance(judgement, Generator):
            judgement = _finished(judgement)
        outcome = RoundOutcome(
            round=self._rounds,
            selected=rows,
            included=rows[~np.isin(rows, list(judgement.set_aside))],
            seconds=self._population.samples[rows] * generator.uniform(0.01, 0.1, len(rows)),
            reports={
                name: _typical(generator, rows) for name in ("loss", *sorted(selector.reports))
            },
            answers=answers,
            samples=self._population.samples if selector.needs_facts else rows[:0],
            facts=facts,
            judgement=judgement,
            prolonged=np.zeros(0) if selection.epochs is None else selection.epochs.astype(float),
        )
        self.state = selector.observe(self.state, outcome)

    def _facts(self, selection: Selection, generator: np.random.Generator) -> UpdateFacts:
        rows, needed = selection.rows, self._selector.needs_facts
        samples = self._population.samples[rows]
        found: dict[str, Floats] = {}
        if UpdateFact.NORM in needed:
            found["norms"] = _typical(generator, rows)
        if UpdateFact.SKETCH in needed:
            found["sketches"] = generator.standard_normal((len(rows), SKETCH_SIZE))
        if UpdateFact.OUTPUT_MOVE in needed:
            shape = len(rows), self._population.classes
            found["output_moves"] = generator.standard_normal(shape)
        if UpdateFact.GRAM in needed:
            updates = generator.standard_normal((len(rows), _UPDATE_PARTS))
            found["gram"] = updates @ updates.T
        weights = samples.astype(np.float64) if selection.weights is None else selection.weights
        return UpdateFacts(
            round=self._rounds,
            seed=1,
            rows=rows,
            samples=weights,
            steps=samples // 32 + 1,
            **found,
        )


def _typical(generator: np.random.Generator, rows: Rows) -> Floats:
    return generator.uniform(0.5, 1.5, len(rows))


def _finished(judging: Generator[Any, Any, Judgement]) -> Judgement:
    """Return the judgement of a generator that requests no loss."""
    try:
        next(judging)
    except StopIteration as ended:
        found: Judgement = ended.value
        return found
    raise TypeError("a selector that needs losses can't be measured")


def measured(selector: Selector, population: Population) -> Measured:
    """Measure selections of 100 clients after rounds in which each client has trained.

    The selector first selects once, so that its questions are known. Then it observes large rounds
    that together have each client, unless it learns nothing from rounds. Two usual rounds follow
    before those that are measured.
    """
    begin = time.process_time()
    past = PastRounds(selector, population)
    past.select(COUNT)
    if type(selector).observe is not Selector.observe:
        past.include_all()
    for _ in range(_OBSERVED):
        past.select(COUNT)
    learning = time.process_time() - begin
    return Measured(
        selecting=min(past.select(COUNT) for _ in range(_TIMED)),
        learning=learning,
        state_bytes=sum(array.nbytes for array in past.state.arrays.values()),
    )


_profiles = lru_cache(maxsize=3)(profiles)


def server_seconds(selector: Selector, clients: int) -> float | None:
    """Return the processor seconds of a selection of 100 clients; None if it can't be measured.

    All clients have trained before, and the selector has observed their rounds. The seconds are
    those of `select` alone, including the handling of answers; what `observe` and `judge` take is
    not included.

    clients: number of clients to choose from, at least 1,000.

    It can't be measured if the selector compares all pairs of clients, if a selection or all rounds
    before it would take longer than a minute, if its state would be larger than 8 GB, or if it
    needs numbers that can't be made up (see `PastRounds`).
    """
    size = max(1_000, clients // 100)
    while True:
        if selector.most_clients is not None and size > selector.most_clients:
            return None
        try:
            found = measured(selector, _profiles(size))
        except Exception:  # a selector of another package may raise any error
            return None
        if size == clients:
            return found.selecting
        following = min(10 * size, clients)
        growth = following / size
        if max(found.selecting, found.learning) * growth > LONGEST_SECONDS:
            return None
        if found.state_bytes * growth > LARGEST_STATE:
            return None
        size = following
