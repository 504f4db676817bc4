"""States that clients keep of their trainings: which is used, and what is deleted."""

from __future__ import annotations

from pathlib import Path

import pytest

from potluck.client.transfer.saved_states import KEPT_DAYS, KeptStates
from potluck.common.errors import StateLostError

WHOSE = ("run", "client-0")
PURPOSES = ("one", "../two")


def save(states: KeptStates, update_id: str) -> None:
    for purpose in PURPOSES:
        states.path(update_id, purpose).write_text(f"{purpose} of {update_id}")
    states.pend(*WHOSE, update_id)


def texts(states: KeptStates, included: str) -> dict[str, str]:
    found = states.find(*WHOSE, included, PURPOSES)
    return {purpose: path.read_text() for purpose, path in found.items()}


def test_states_of_all_purposes_of_an_update_are_kept_together(tmp_path: Path) -> None:
    states = KeptStates(tmp_path)
    assert states.begin(*WHOSE, "", PURPOSES) == {}
    save(states, "first")
    assert texts(states, "") == {}
    assert texts(states, "first") == {p: f"{p} of first" for p in PURPOSES}, "before it is settled"
    states.settle(*WHOSE, "first", included=True)
    states.begin(*WHOSE, "first", PURPOSES)
    save(states, "second")
    states = KeptStates(tmp_path)  # a new process after a kill
    for included in ("first", "second"):
        assert texts(states, included) == {p: f"{p} of {included}" for p in PURPOSES}
    states.settle(*WHOSE, "second", included=False)
    assert texts(states, "first") == {p: f"{p} of first" for p in PURPOSES}
    with pytest.raises(StateLostError):
        states.find(*WHOSE, "second", PURPOSES)
    assert len(list(tmp_path.iterdir())) == 3


def test_new_training_drops_pending_states_and_lookup_does_not(tmp_path: Path) -> None:
    states = KeptStates(tmp_path)
    save(states, "first")
    assert texts(states, "") == {}
    assert texts(states, "first") != {}
    states.begin(*WHOSE, "", PURPOSES)
    with pytest.raises(StateLostError):
        states.find(*WHOSE, "first", PURPOSES)


def test_state_without_a_purpose_is_refused_and_other_states_are_kept(tmp_path: Path) -> None:
    states = KeptStates(tmp_path)
    save(states, "first")
    with pytest.raises(StateLostError, match=r"lost the state 'three' of update 'first'"):
        states.begin(*WHOSE, "first", [*PURPOSES, "three"])
    assert texts(states, "first") != {}


def test_state_files_without_a_record_and_of_old_runs_are_deleted(tmp_path: Path) -> None:
    states = KeptStates(tmp_path)
    save(states, "first")
    orphan = states.path("given up", "one")
    orphan.touch()
    KeptStates(tmp_path)
    assert not orphan.exists()
    [record] = tmp_path.glob("*.json")
    later = record.stat().st_mtime + 86400.0 * (KEPT_DAYS + 1)
    KeptStates(tmp_path, now=later)
    assert list(tmp_path.iterdir()) == []


def test_states_of_an_abandoned_update_are_deleted(tmp_path: Path) -> None:
    states = KeptStates(tmp_path)
    states.path("given up", "one").touch()
    states.discard("given up")
    assert list(tmp_path.iterdir()) == []
