"""The outcome of a round that a selector observes, in the order of the clients it selected."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from potluck.server.rounds import events as rounds
from potluck.server.rounds.plan import draw_up
from potluck.server.rounds.roster import RunRoster
from potluck.server.runs.commit import _outcome
from potluck.server.runs.run import Run
from potluck.server.selection import Judgement
from potluck.server.store.records import AS_THE_RUN_SAYS, UpdateRow


def update(loss: float, utility: float) -> UpdateRow:
    return UpdateRow(
        blake3="0" * 64,
        size=1,
        encoding="float32",
        delta=False,
        compressed=False,
        samples=40,
        steps=10,
        seconds=loss + 1,
        loss=loss,
        reports={"utility": utility},
    )


def test_reports_and_seconds_are_per_selected_client() -> None:
    """Clients a and c have updates; the one of d came too late to be included."""
    plan = draw_up('[task]\nname = "digits"\n[selector]\nname = "oort"\n', source="test")
    updates = {"d": update(7.0, 8.0), "a": update(0.5, 3.0), "c": update(0.25, 2.0)}
    run: Any = SimpleNamespace(
        plan=plan,
        roster=RunRoster("abcd"),
        attempt=SimpleNamespace(
            cohort=dict.fromkeys("dcba", SimpleNamespace(work=AS_THE_RUN_SAYS)),
            spared=set(),
            answers=(),
        ),
        updates=SimpleNamespace(
            received={client: SimpleNamespace(row=row) for client, row in updates.items()},
            joining=(),
        ),
        models=SimpleNamespace(result=SimpleNamespace(judgement=Judgement(), facts=None)),
    )
    found = _outcome(cast(Run, run), rounds.Commit(round=1, attempt=1, included=("a", "c")))
    assert found.selected.tolist() == [3, 2, 1, 0]
    assert sorted(found.included.tolist()) == [0, 2]
    nothing = np.nan
    np.testing.assert_array_equal(found.reports["loss"], [nothing, 0.25, nothing, 0.5])
    np.testing.assert_array_equal(found.reports["utility"], [nothing, 2.0, nothing, 3.0])
    np.testing.assert_array_equal(found.seconds, [nothing, 1.25, nothing, 1.5])
