"""Populations for selectors, and rounds simulated without coordinator and clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache

import numpy as np
from numpy.typing import ArrayLike

from potluck.common.learning.heterogeneity import triplets
from potluck.common.tasks.table6 import interaction_matrices
from potluck.server.selection import (
    SKETCH_SIZE,
    Answers,
    Ask,
    Floats,
    Judgement,
    MeasureMean,
    Population,
    RoundOutcome,
    Rows,
    Selection,
    SelectionContext,
    Selector,
    UpdateFacts,
)
from potluck.server.state import State


def population(
    clients: int,
    *,
    classes: int = 2,
    label_counts: ArrayLike | None = None,
    triplet_rows: ArrayLike | None = None,
    matrices: ArrayLike | None = None,
) -> Population:
    def column(
        values: ArrayLike | None,
    ) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]] | None:
        return None if values is None else np.array(values, dtype=np.float64)

    return Population(
        ids=[f"k{row}" for row in range(clients)],
        classes=classes,
        samples=np.zeros(clients, dtype=np.int64),
        label_counts=column(label_counts),
        triplets=column(triplet_rows),
        interaction_matrices=column(matrices),
    )


def labelled(counts: Sequence[Sequence[float]]) -> Population:
    return population(len(counts), classes=len(counts[0]), label_counts=counts)


def difficult_labels(generator: np.random.Generator) -> Floats:
    """Return label counts (15 clients × 4 classes) with special cases.

    Clients 2, 7 and 13 are equal, clients 3 and 12 have no samples, clients 5 and 14 sent no
    counts, and noise has made counts of clients 3 and 4 negative."""
    table = generator.integers(0, 9, (15, 4)).astype(np.float64)
    table[generator.random((15, 4)) >= 0.5] = 0
    table[:, 1] += 1
    table[7], table[13], table[4, 2:] = table[2], table[2], -3
    table[3], table[12], table[[5, 14]] = [-2, 0, -1, 0], 0, np.nan
    return table


def table_6(name: str) -> Population:
    matrices = interaction_matrices(name)
    return population(
        len(matrices),
        classes=matrices.shape[1],
        triplet_rows=triplets(matrices),
        matrices=matrices,
        label_counts=matrices.sum(axis=2),
    )


def context(
    federation: Population,
    count: int,
    *,
    number: int = 1,
    seed: int = 0,
    available: Rows | None = None,
) -> SelectionContext:
    rows = np.arange(len(federation)) if available is None else available
    return SelectionContext(
        round=number, seed=seed, count=count, population=federation, available=rows.astype(np.int64)
    )


Respond = Callable[[Ask], Answers]
"""Function that returns the clients' answers to a question."""

QUESTIONS = {
    "loss": ("loss",),
    "context": ("robust", "validation", "seconds"),
    "gradient-norm": ("gradient-norm", "seconds"),
    "availability": ("availability",),
    "label-entropy": ("label-entropy",),
    "sketch": tuple(f"sketch-{number}" for number in range(1, 23)),
}
"""Names of the values that each kind of question requests."""


def respond(ask: Ask) -> Answers:
    """Return answers of all clients, each with a different value."""
    return Answers(
        rows=ask.rows,
        values={
            name: (1.0 + ask.rows % 7 + 0.1 * number).astype(np.float64)
            for number, name in enumerate(QUESTIONS[ask.kind])
        },
    )


def played(
    selector: Selector, state: State, given: SelectionContext, answering: Respond = respond
) -> tuple[Selection, list[Answers]]:
    """Return the selection of a round, and the answers that it used."""
    choosing = selector.select(state, given)
    if isinstance(choosing, Selection):
        return choosing, []
    answers: list[Answers] = []
    try:
        ask = next(choosing)
        while True:
            assert isinstance(ask, Ask)
            answers.append(answering(ask))
            ask = choosing.send(answers[-1])
    except StopIteration as ended:
        selection: Selection = ended.value
        return selection, answers


def select(
    selector: Selector, state: State, given: SelectionContext, answering: Respond = respond
) -> Selection:
    """Return the selection of a round."""
    return played(selector, state, given, answering)[0]


PARAMETERS, CLASSES = 30, 3


def facts(rows: Rows, number: int = 1, *, seed: int = 0) -> UpdateFacts:
    """Return facts of updates, made up from round and client; some updates are equal. Each has 2
    steps and 5 samples."""
    updates = np.array([_update(number % 2, int(row) % 5) for row in rows])
    return facts_of(updates.reshape(len(rows), PARAMETERS), rows=rows, number=number, seed=seed)


@cache
def _update(round_kind: int, client_kind: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Return the made-up update of a kind of client in a kind of round."""
    return np.random.default_rng([round_kind, client_kind]).normal(size=PARAMETERS)


def facts_of(
    updates: ArrayLike, *, rows: Rows | None = None, number: int = 1, seed: int = 0
) -> UpdateFacts:
    """Return facts of these updates, one per row; a row begins with the output layer's bias."""
    table = np.array(updates, dtype=np.float64)
    sketches = np.zeros((len(table), SKETCH_SIZE))
    sketches[:, : table.shape[1]] = table
    return UpdateFacts(
        round=number,
        seed=seed,
        rows=np.arange(len(table)) if rows is None else rows,
        samples=np.full(len(table), 5.0),
        steps=np.full(len(table), 2),
        gram=table @ table.T,
        sketches=sketches,
        output_moves=table[:, :CLASSES],
        norms=np.linalg.norm(table, axis=1),
    )


def judged(
    selector: Selector,
    state: State,
    given: UpdateFacts,
    measured: Callable[[MeasureMean], float] = lambda wanted: 1.0 / (1 + len(wanted.rows)),
) -> Judgement:
    """Return the selector's judgement of a round's updates."""
    judging = selector.judge(state, given)
    if isinstance(judging, Judgement):
        return judging
    try:
        wanted = next(judging)
        while True:
            wanted = judging.send(measured(wanted))
    except StopIteration as ended:
        judgement: Judgement = ended.value
        return judgement


def outcome(
    number: int,
    selection: Selection,
    answers: Sequence[Answers] = (),
    *,
    judgement: Judgement | None = None,
    samples: ArrayLike = (),
    **reports: ArrayLike,
) -> RoundOutcome:
    """Return the outcome of a round in which every selected client sent an update after 1 s.

    samples: numbers of samples of all clients of the roster."""
    judgement = judgement or Judgement()
    return RoundOutcome(
        round=number,
        selected=selection.rows,
        included=selection.rows[~np.isin(selection.rows, list(judgement.set_aside))],
        facts=facts(selection.rows, number),
        judgement=judgement,
        samples=np.asarray(samples, dtype=np.int64),
        seconds=np.ones(len(selection.rows)),
        reports={name: np.asarray(values, dtype=np.float64) for name, values in reports.items()},
        answers=answers,
    )


def rounds(
    selector: Selector,
    federation: Population,
    count: int,
    number_of_rounds: int,
    *,
    seed: int = 0,
    store: Callable[[State], State] = lambda state: state,
) -> Iterator[Selection]:
    """Yield the selections of rounds 1, 2, … with all clients available. store: function that each
    state passes through between rounds."""
    state = store(selector.init(federation))
    for number in range(1, number_of_rounds + 1):
        given = context(federation, count, number=number, seed=seed)
        selection, answers = played(selector, state, given)
        yield selection
        judgement = judged(selector, state, facts(selection.rows, number))
        utility = 1.0 + selection.rows % 5
        ended = outcome(number, selection, answers, judgement=judgement, utility=utility)
        state = store(selector.observe(state, ended))
