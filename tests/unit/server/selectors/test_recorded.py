"""Selectors against recorded inputs and picks, so that a change of their arithmetic is noticed.

`inputs.json` in `tests/testdata/selectors` is a made-up federation: for each client its samples,
label counts and seconds, and for each round its loss, gradient norm and update. Each other file is
a selector with its options, and the cohorts, weights and last state that follow. Other tests
compare the same selectors with second implementations. After an intended change,
`pytest tests/unit/server/selectors/test_recorded.py --rewrite` writes the current picks; read the
difference before you commit it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.populations import context, facts_of, played, population
from support.repository import TESTDATA

from potluck.common.settings.plugins import create
from potluck.server.selection import Answers, Ask, Floats, RoundOutcome, Selector
from potluck.server.state import State

FOLDER = TESTDATA / "selectors"
INPUTS = json.loads((FOLDER / "inputs.json").read_text())
FILES = sorted(path for path in FOLDER.glob("*.json") if path.stem != "inputs")
ANSWERS = {"loss": "losses", "gradient-norm": "norms"}
LOST = 5
"""Row of the client whose updates never arrive."""


def replayed(path: Path) -> dict[str, Any]:
    """Return what the selector of a file does in the recorded federation, in the file's form."""
    recorded = json.loads(path.read_text())
    name, count, rounds = path.stem, recorded["count"], recorded["rounds"]
    selector = create(Selector, name, recorded["options"])
    labels = INPUTS["labels"]
    federation = replace(
        population(len(labels), classes=len(labels[0]), label_counts=labels),
        samples=np.array(INPUTS["samples"]),
    )
    state, picks = selector.init(federation), []
    for number in range(1, rounds + 1):
        given = replace(context(federation, count, number=number, seed=11), rounds=rounds)

        def answer(ask: Ask, place: int = number - 1) -> Answers:
            numbers = np.array(INPUTS[ANSWERS[ask.kind]][place])
            return Answers(rows=ask.rows, values={ask.kind: numbers[ask.rows]})

        selection, answers = played(selector, state, given, answer)
        weights: Floats = federation.samples[selection.rows].astype(np.float64)
        picks.append({"cohort": selection.rows.tolist()})
        if selection.weights is not None:
            weights = selection.weights
            picks[-1]["weights"] = weights.tolist()
        arrived = selection.rows[selection.rows != LOST]
        facts = facts_of(
            np.array(INPUTS["updates"][number - 1])[arrived], rows=arrived, number=number
        )
        ended = RoundOutcome(
            round=number,
            selected=selection.rows,
            included=arrived,
            seconds=np.where(
                selection.rows == LOST, np.nan, np.array(INPUTS["seconds"])[selection.rows]
            ),
            answers=answers,
            facts=replace(facts, samples=weights[selection.rows != LOST]),
        )
        state = selector.observe(state, ended)
    return {**recorded, "picks": picks, "state": as_json(state)}


def as_json(state: State) -> dict[str, Any]:
    """Return a state as JSON: tables as lists of all their values, NaN as null."""
    arrays = {
        name: [None if np.isnan(value) else value for value in array.ravel().tolist()]
        for name, array in state.arrays.items()
    }
    return {**arrays, **state.scalars}


def test_the_recorded_selectors_are_those_expected() -> None:
    assert {path.stem for path in FILES} == {
        "afl", "delta", "fed-cbs", "fedcs", "fedgs", "flips", "k-vib", "ocs", "osmd",
        "tifl",
    }  # fmt: skip


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_recorded_inputs_give_the_recorded_picks(path: Path, pytestconfig: pytest.Config) -> None:
    found, recorded = replayed(path), json.loads(path.read_text())
    if pytestconfig.getoption("rewrite"):
        path.write_text(compact(found))
        return
    for number, (pick, expected) in enumerate(
        zip(found["picks"], recorded["picks"], strict=True), start=1
    ):
        assert pick["cohort"] == expected["cohort"], f"round {number}"
        assert pick.get("weights", []) == pytest.approx(expected.get("weights", []), rel=1e-9)
    assert found["state"].keys() == recorded["state"].keys()
    for name, values in recorded["state"].items():
        assert found["state"][name] == pytest.approx(values, rel=1e-9), name


def compact(content: dict[str, Any]) -> str:
    """Return JSON with one line per round and per array of the state."""
    lines = [f'  "{name}": {json.dumps(content[name])}' for name in ("options", "count", "rounds")]
    picks = ",\n".join(f"    {json.dumps(each)}" for each in content["picks"])
    state = ",\n".join(
        f"    {json.dumps(name)}: {json.dumps(values)}" for name, values in content["state"].items()
    )
    lines += [f'  "picks": [\n{picks}\n  ]', f'  "state": {{\n{state}\n  }}']
    return "{\n" + ",\n".join(lines) + "\n}\n"
