"""Runs and rosters, on both databases."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.stored import AT, RUN, begun_run, committed, digest

from potluck.common.errors import NotFoundError, StorageError
from potluck.server.store import AttemptKey, RunState, Store, store
from potluck.server.store.records import LeftOutRow
from potluck.server.store.sql import schema

LATER = AT + timedelta(hours=1)
# All examples share one store: each example overwrites the values of the one before.
SHARED = [HealthCheck.function_scoped_fixture]


def test_added_run_is_read_back_unchanged(store: Store) -> None:
    widest = replace(RUN, seed=2**64 - 1, run_file='[task]\nname = "digits"  # ünïcode\n')
    store.add_run(widest)
    row = store.run(RUN.run_id)
    assert {name: getattr(row, name) for name in vars(widest)} == vars(widest)
    assert row.created_at.tzinfo is UTC
    assert (row.state, row.reason, row.changed_at) == (RunState.WAITING, "", AT)
    assert (row.committed_rounds, row.model_blake3) == (0, None)


def test_time_in_another_zone_is_stored_as_the_same_instant(store: Store) -> None:
    there = timezone(timedelta(hours=5, minutes=30))
    store.add_run(replace(RUN, created_at=AT.astimezone(there)))
    assert store.run(RUN.run_id).created_at == AT


def test_time_without_a_time_zone_is_refused(store: Store) -> None:
    with pytest.raises(StorageError, match="no time zone"):
        store.add_run(replace(RUN, created_at=datetime(2026, 1, 1)))  # no time zone
    assert store.runs() == []


def test_second_run_with_the_same_id_is_refused(store: Store) -> None:
    store.add_run(RUN)
    with pytest.raises(StorageError, match="run ab12 exists already"):
        store.add_run(replace(RUN, name="other"))
    assert [run.name for run in store.runs()] == ["digits"]


def test_all_runs_are_listed_newest_first_and_unfinished_runs_oldest_first(store: Store) -> None:
    for run_id in ("c", "a", "b", "d"):
        store.add_run(replace(RUN, run_id=run_id))
    store.set_run_state("c", RunState.FINISHED, "", LATER)
    store.set_run_state("b", RunState.RUNNING, "", LATER)
    assert [run.run_id for run in store.runs()] == ["d", "b", "a", "c"]
    assert [run.run_id for run in store.unfinished_runs()] == ["a", "b", "d"]
    first, second = store.runs(limit=2)
    assert [first.run_id, second.run_id] == ["d", "b"]
    assert [run.run_id for run in store.runs(before=second.number, limit=5)] == ["a", "c"]


@pytest.mark.parametrize("state", list(RunState))
def test_state_and_reason_of_a_run_are_stored(store: Store, state: RunState) -> None:
    store.add_run(RUN)
    store.set_run_state(RUN.run_id, state, "so it is", LATER)
    row = store.run(RUN.run_id)
    assert (row.state, row.reason, row.changed_at) == (state, "so it is", LATER)


def test_run_row_shows_committed_rounds_and_the_newest_model(store: Store) -> None:
    begun_run(store)
    assert store.run(RUN.run_id).model_blake3 == digest(0)
    committed(store, AttemptKey(RUN.run_id, 1, 1))
    committed(store, AttemptKey(RUN.run_id, 2, 1))
    row = store.run(RUN.run_id)
    assert (row.committed_rounds, row.model_blake3) == (2, digest(2))
    assert store.runs() == [row]


def test_unique_prefix_of_a_run_id_finds_the_run(store: Store) -> None:
    for run_id in ("ab12", "ab", "cd_1", "cdx1", "Ab99"):
        store.add_run(replace(RUN, run_id=run_id))
    assert store.run("ab1").run_id == "ab12"
    assert store.run("ab").run_id == "ab"  # an id has precedence over the beginning of an id
    assert store.run("cd_").run_id == "cd_1"  # no wildcard
    assert store.run("A").run_id == "Ab99"  # case counts
    with pytest.raises(
        NotFoundError,
        match=r"'cd' matches 2 runs; use the id of a single run \(newest first\): cdx1, cd_1",
    ):
        store.run("cd")
    with pytest.raises(NotFoundError, match="the runs are: Ab99, cdx1, cd_1, ab, ab12"):
        store.run("x")
    with pytest.raises(NotFoundError, match="no run ''"):
        store.run("")
    with pytest.raises(NotFoundError, match="no run 'a%'"):
        store.run("a%")
    with pytest.raises(NotFoundError):
        store.run("\0")


def test_run_is_found_by_its_name_if_the_name_is_unique(store: Store) -> None:
    names = {"ab": "tea", "cd": "tea", "ef": "co%ee", "0f": "ef0", "ef0": "x"}
    for run_id, name in names.items():
        store.add_run(replace(RUN, run_id=run_id, name=name))
    assert store.run("co%ee").run_id == "ef"
    with pytest.raises(NotFoundError, match=r"'tea' matches 2 runs; .*: cd, ab"):
        store.run("tea")
    assert store.run("ef0").run_id == "ef0"  # an id has precedence over a name
    store.add_run(replace(RUN, run_id="c0ffee", name="e"))
    with pytest.raises(NotFoundError, match="'e' matches 3 runs"):
        store.run("e")  # ambiguous: a name, and the beginning of two ids


def test_error_for_an_unknown_run_lists_ten_runs_at_most(store: Store) -> None:
    for number in range(12):
        store.add_run(replace(RUN, run_id=f"r{number}"))
    with pytest.raises(NotFoundError, match=r"the runs are: r11, .*, r2 and 2 more"):
        store.run("x")


def test_changes_to_an_unknown_run_are_refused(store: Store) -> None:
    with pytest.raises(NotFoundError, match="no run 'ab12'; the runs are: none"):
        store.set_run_state(RUN.run_id, RunState.STOPPED, "", AT)
    with pytest.raises(NotFoundError):
        store.set_initial_model(RUN.run_id, digest(0), AT)
    with pytest.raises(NotFoundError):
        store.append_to_roster(RUN.run_id, ["a"])
    assert store.roster(RUN.run_id) == []


def test_initial_model_of_a_run_cannot_change(store: Store) -> None:
    begun_run(store)
    store.set_initial_model(RUN.run_id, digest(0), LATER)
    with pytest.raises(StorageError, match="started from model"):
        store.set_initial_model(RUN.run_id, digest(9), LATER)
    assert store.run(RUN.run_id).model_blake3 == digest(0)


def test_roster_appends_clients_and_refuses_duplicates(store: Store) -> None:
    store.add_run(RUN)
    for clients in (["b", "a"], ["z", "c"], []):
        store.append_to_roster(RUN.run_id, clients)
    assert store.roster(RUN.run_id) == ["b", "a", "z", "c"]
    with pytest.raises(StorageError, match="client a is already in the roster"):
        store.append_to_roster(RUN.run_id, ["x", "a"])
    with pytest.raises(StorageError, match="client y is already in the roster"):
        store.append_to_roster(RUN.run_id, ["y", "y"])
    assert store.roster(RUN.run_id) == ["b", "a", "z", "c"]


@settings(max_examples=25, deadline=None, suppress_health_check=SHARED)
@given(text=st.text())
def test_any_text_can_be_stored_as_the_reason_of_a_run(store: Store, text: str) -> None:
    if not store.runs():
        store.add_run(RUN)
    store.set_run_state(RUN.run_id, RunState.FAILED, text, AT)
    kept = store.run(RUN.run_id).reason
    assert len(kept) == len(text)
    assert "\0" not in kept
    if "\0" not in text:
        assert kept == text
    store.set_run_state(RUN.run_id, RunState.FAILED, "\ud800 half a surrogate", AT)
    assert store.run(RUN.run_id).reason == "? half a surrogate"


def test_deleting_a_run_keeps_other_runs_and_returns_its_files(store: Store) -> None:
    for run_id in (RUN.run_id, "cd34"):
        begun_run(store, run_id)
        committed(store, AttemptKey(run_id, 1, 1))
    left_out = LeftOutRow(client_id="b", process_id="1", trouble="no data", at=AT)
    store.leave_out(RUN.run_id, [left_out])
    files = store.delete_runs([RUN.run_id, "no-such-run"])
    assert files == {digest(0), digest(1), digest(1001)}
    assert [run.run_id for run in store.runs()] == ["cd34"]
    with pytest.raises(NotFoundError, match="no run 'ab12'"):
        store.run(RUN.run_id)
    assert store.last_rounds() == {"cd34": 1}
    assert {holder.run_id for holder in store.holders(files)} == {"cd34"}
    assert store.roster("cd34") == ["a", "b", "c"]
    begun_run(store)  # a new run with the same id works
    assert store.run(RUN.run_id).committed_rounds == 0


def test_deleting_runs_covers_every_table_with_run_ids() -> None:
    kept = {"secure_sums"}  # kept as the record of disclosures
    of_runs = {table.name for table in schema.metadata.tables.values() if "run_id" in table.c}
    assert {table.name for table in store.OF_RUNS} == of_runs - kept
