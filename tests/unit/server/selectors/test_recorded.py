"""Selectors against recorded inputs and picks, so that a change of their arithmetic is noticed.

`inputs.json` in `tests/testdata/selectors` is a made-up federation: for each client its samples,
interaction matrix, label counts, availability and seconds, and for each round its loss on
validation and training data, gradient norm and update. Each other file is a selector with its
options, and the cohorts, weights and last state that follow. Other tests compare the same selectors
with the authors' figures or with second implementations.

For a new selector, add a file with `options`, `count` and `rounds`. Then run
`pytest tests/unit/server/selectors/test_recorded.py --rewrite`, which writes the current picks. Run
it also after an intended change, and read the difference before you commit it.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.populations import QUESTIONS, context, facts_of, judged, played, population
from support.repository import TESTDATA

from compatibility_table import built_in
from potluck.common.learning.heterogeneity import triplets
from potluck.common.settings.plugins import SELECTORS, create
from potluck.server.selection import (
    Answers,
    Ask,
    Floats,
    MeasureMean,
    RoundOutcome,
    Selector,
)
from potluck.server.state import State

FOLDER = TESTDATA / "selectors"
INPUTS = json.loads((FOLDER / "inputs.json").read_text())
FILES = sorted(path for path in FOLDER.glob("*.json") if path.stem != "inputs")
LOST = 5
"""Row of the client whose updates never arrive."""
MOST = 100
"""Maximum number of values of an array that are recorded in full. Of larger arrays, the size, mean,
root mean square and mean by place are recorded."""


def answers_to(ask: Ask, place: int) -> Answers:
    """Return the clients' answers to a question. place: number of the round, from 0."""
    labels = np.array(INPUTS["labels"], dtype=np.float64)
    shares = labels / labels.sum(axis=1, keepdims=True)
    updates = np.array(INPUTS["updates"][place])
    told = {
        "loss": {"loss": INPUTS["losses"][place]},
        "context": {
            "robust": INPUTS["losses"][place],
            "validation": INPUTS["validation"][place],
            "seconds": INPUTS["seconds"],
        },
        "gradient-norm": {"gradient-norm": INPUTS["norms"][place], "seconds": INPUTS["seconds"]},
        "availability": {"availability": INPUTS["availability"]},
        "label-entropy": {"label-entropy": entropies(shares)},
        "sketch": {
            f"sketch-{number}": updates[:, number - 1] if number <= 6 else np.zeros(len(updates))
            for number in range(1, 23)
        },
    }[ask.kind]
    return Answers(
        rows=ask.rows,
        values={
            name: np.array(told[name], dtype=np.float64)[ask.rows] for name in QUESTIONS[ask.kind]
        },
    )


def entropies(shares: Floats) -> Floats:
    """Return the Shannon entropy of each row, in nats."""
    found: Floats = -np.sum(shares * np.log(np.where(shares > 0, shares, 1)), axis=1)
    return found


def replayed(path: Path) -> dict[str, Any]:
    """Return what the selector of a file does in the recorded federation, in the file's form."""
    recorded = json.loads(path.read_text())
    name, count, rounds = path.stem, recorded["count"], recorded["rounds"]
    selector = create(Selector, name, recorded["options"])
    labels = INPUTS["labels"]
    matrices = np.array(INPUTS["matrices"], dtype=np.float64)
    federation = replace(
        population(
            len(labels),
            classes=len(labels[0]),
            label_counts=labels,
            triplet_rows=triplets(matrices),
            matrices=matrices,
        ),
        samples=np.array(INPUTS["samples"]),
    )
    state, picks = selector.init(federation), []
    for number in range(1, rounds + 1):
        given = replace(context(federation, count, number=number, seed=11), rounds=rounds)
        losses = np.array(INPUTS["losses"][number - 1])
        selection, answers = played(
            selector, state, given, functools.partial(answers_to, place=number - 1)
        )
        weights: Floats = federation.samples[selection.rows].astype(np.float64)
        picks.append({"cohort": selection.rows.tolist()})
        if selection.weights is not None:
            weights = selection.weights
            picks[-1]["weights"] = weights.tolist()
        if selection.epochs is not None:
            picks[-1]["epochs"] = selection.epochs.tolist()
        if selection.dropped is not None:
            picks[-1]["dropped"] = [sorted(names) for names in selection.dropped]
        arrived = selection.rows[selection.rows != LOST]
        facts = facts_of(
            np.array(INPUTS["updates"][number - 1])[arrived], rows=arrived, number=number
        )
        judgement = judged(selector, state, facts, functools.partial(mean_loss, losses))
        ended = RoundOutcome(
            round=number,
            selected=selection.rows,
            included=arrived[~np.isin(arrived, list(judgement.set_aside))],
            seconds=np.where(
                selection.rows == LOST, np.nan, np.array(INPUTS["seconds"])[selection.rows]
            ),
            answers=answers,
            reports={"utility": losses[selection.rows]},
            judgement=judgement,
            samples=federation.samples,
            facts=replace(facts, samples=weights[selection.rows != LOST]),
        )
        state = selector.observe(state, ended)
    return {**recorded, "picks": picks, "state": as_json(state)}


def mean_loss(losses: Floats, wanted: MeasureMean) -> float:
    """Return the mean loss of these clients; 2 if there are none."""
    return float(np.mean(losses[wanted.rows])) if len(wanted.rows) else 2.0


def as_json(state: State) -> dict[str, Any]:
    """Return a state as JSON: tables as lists of all their values, NaN as null; see `MOST`."""
    arrays = {
        name: [None if np.isnan(value) else value for value in array.ravel().tolist()]
        if array.size <= MOST
        else summary(array.ravel().astype(np.float64))
        for name, array in state.arrays.items()
    }
    return {**arrays, **state.scalars}


def summary(values: Floats) -> list[float]:
    """Return the size, mean, root mean square, and mean of the values times their places."""
    assert np.isfinite(values).all()
    places = np.linspace(0, 1, len(values))
    means = (values.mean(), np.sqrt(np.mean(values**2)), np.mean(values * places))
    return [float(len(values)), *map(float, means)]


def test_every_selector_is_recorded() -> None:
    assert sorted(path.stem for path in FILES) == sorted(built_in(SELECTORS))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_recorded_inputs_give_the_recorded_picks(path: Path, pytestconfig: pytest.Config) -> None:
    found, recorded = replayed(path), json.loads(path.read_text())
    if pytestconfig.getoption("rewrite"):
        path.write_text(compact(found))
        return
    for number, (pick, expected) in enumerate(
        zip(found["picks"], recorded["picks"], strict=True), start=1
    ):
        for name in ("cohort", "epochs", "dropped"):
            assert pick.get(name) == expected.get(name), f"{name} of round {number}"
        assert pick.get("weights", []) == pytest.approx(expected.get("weights", []), rel=1e-9)
    assert found["state"].keys() == recorded["state"].keys()
    for name, values in recorded["state"].items():
        expected = pytest.approx(with_nan(values), rel=1e-9, nan_ok=True)
        assert with_nan(found["state"][name]) == expected, name


def with_nan(values: Any) -> Any:
    """Return a value or a list of values with NaN in place of null."""
    if isinstance(values, list):
        return [math.nan if value is None else value for value in values]
    return math.nan if values is None else values


def compact(content: dict[str, Any]) -> str:
    """Return JSON with one line per round and per array of the state."""
    lines = [f'  "{name}": {json.dumps(content[name])}' for name in ("options", "count", "rounds")]
    picks = ",\n".join(f"    {json.dumps(each)}" for each in content["picks"])
    state = ",\n".join(
        f"    {json.dumps(name)}: {json.dumps(values)}" for name, values in content["state"].items()
    )
    lines += [f'  "picks": [\n{picks}\n  ]', f'  "state": {{\n{state}\n  }}']
    return "{\n" + ",\n".join(lines) + "\n}\n"
