"""Seconds that a selection among many clients takes: profiles, answers, a few rounds of a
selector."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from potluck.common.learning.heterogeneity import triplets
from potluck.server.selection import (
    Answers,
    Ask,
    Interview,
    Population,
    RoundOutcome,
    Selection,
    SelectionContext,
    Selector,
)

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
    """Return the shortest total time of `select` and `observe`, over a few successive rounds."""
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


COUNT = 100
"""Number of clients that a measured selection chooses."""

LONGEST_SECONDS = 60.0
"""Maximum expected duration of a selection in seconds; a longer one is not measured."""


_profiles = lru_cache(maxsize=3)(profiles)


def server_seconds(selector: Selector, clients: int) -> float | None:
    """Return the processor seconds of a selection of 100 clients; None if it can't be measured.

    clients: number of clients to choose from, at least 1,000.

    It can't be measured if the selector compares all pairs of clients, would take longer than a
    minute, or needs more than profiles and answers.
    """
    found = 0.0
    size = max(1_000, clients // 100)
    while True:
        if selector.most_clients is not None and size > selector.most_clients:
            return None
        try:
            found = seconds_per_round(selector, _profiles(size), COUNT, 2, time.process_time)
        except Exception:  # a selector of another package may raise any error
            return None
        if size == clients:
            return found
        following = min(10 * size, clients)
        if found * following / size > LONGEST_SECONDS:
            return None
        size = following
