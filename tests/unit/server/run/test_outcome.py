"""The outcome of a round that a selector observes, in the order of the clients it selected."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.small_runs import small_run

from potluck.server.machine import events as rounds
from potluck.server.reduce.update_files import SpooledUpdate
from potluck.server.run.commit import _outcome
from potluck.server.store import Store
from potluck.server.store.records import UpdateRow

RUN_FILE = (
    'clients_per_round = 4\n[task]\nname = "digits"\nclients = 4\n[selector]\nname = "oort"\n'
)


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


async def test_reports_and_seconds_are_per_selected_client(tmp_path: Path) -> None:
    """Clients a and c have updates; the update of d came too late to be included."""
    with Store.open(f"sqlite:///{tmp_path / 'store.sqlite3'}") as store:
        small = await small_run(tmp_path, store, RUN_FILE)
        await small.begin_round("d", "c", "b", "a")
    rows = {"d": update(7.0, 8.0), "a": update(0.5, 3.0), "c": update(0.25, 2.0)}
    for client, row in rows.items():
        received = SpooledUpdate(client=client, path=tmp_path / client, row=row)
        small.run.updates.received[client] = received
    found = _outcome(small.run, rounds.Commit(round=1, attempt=1, included=("a", "c")))
    assert found.selected.tolist() == [3, 2, 1, 0]
    assert sorted(found.included.tolist()) == [0, 2]
    nothing = np.nan
    np.testing.assert_array_equal(found.reports["loss"], [nothing, 0.25, nothing, 0.5])
    np.testing.assert_array_equal(found.reports["utility"], [nothing, 2.0, nothing, 3.0])
    np.testing.assert_array_equal(found.seconds, [nothing, 1.25, nothing, 1.5])


async def test_clients_that_over_selection_made_unnecessary_are_in_the_cohort_only(
    tmp_path: Path,
) -> None:
    """They did not fail: their update may have been on its way."""
    with Store.open(f"sqlite:///{tmp_path / 'store.sqlite3'}") as store:
        small = await small_run(tmp_path, store, RUN_FILE)
        await small.begin_round("d", "c", "b", "a")
    small.run.machine.cohort.spare(["c"])
    for client in "ad":
        small.run.updates.received[client] = SpooledUpdate(
            client=client, path=tmp_path / client, row=update(0.5, 3.0)
        )
    found = _outcome(small.run, rounds.Commit(round=1, attempt=1, included=("a", "d")))
    assert found.selected.tolist() == [3, 1, 0]
    assert (found.cohort.tolist(), found.surplus.tolist()) == ([3, 2, 1, 0], [2])
    np.testing.assert_array_equal(found.seconds, [1.5, np.nan, 1.5])
    small.run.attempt.spared.add("c")  # as a client that skips its upload, it stays
    found = _outcome(small.run, rounds.Commit(round=1, attempt=1, included=("a", "d")))
    assert found.selected.tolist() == [3, 2, 1, 0]
    assert found.spared.tolist() == [2]


@pytest.mark.parametrize(("selector", "expected"), [("k-vib", [0, 30, 0, 10]), ("oort", [])])
async def test_numbers_of_samples_are_those_known_at_the_selection_if_facts_are_needed(
    selector: str, expected: list[int], tmp_path: Path
) -> None:
    with Store.open(f"sqlite:///{tmp_path / 'store.sqlite3'}") as store:
        small = await small_run(tmp_path, store, RUN_FILE.replace("oort", selector))
        small.run.roster.note_samples({"b": 30, "d": 10})
        await small.begin_round("d", "c", "b", "a")
    small.run.updates.received["a"] = SpooledUpdate(
        client="a", path=tmp_path / "a", row=update(0.5, 3.0)
    )
    found = _outcome(small.run, rounds.Commit(round=1, attempt=1, included=("a",)))
    assert found.samples.tolist() == expected
