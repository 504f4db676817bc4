"""Copies of committed rounds, put back into an empty or an older database of each kind."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import create_engine, select
from support.stored import AT, RUN, UPDATE, begun_run, commit, committed, digest, selected

from potluck.common.errors import StorageError
from potluck.server.store import AttemptKey, MemberState, RunState, Store
from potluck.server.store.records import LateRow, LateState
from potluck.server.store.round_copies import Tables
from potluck.server.store.sql import schema
from potluck.server.store.store import OF_RUNS

FIRST = AttemptKey(RUN.run_id, 1, 1)
LATE = LateRow(
    run_id=RUN.run_id,
    round=1,
    attempt=1,
    client_id="b",
    state=LateState.AWAITED,
    model_blake3=digest(0),
)


def eventful(store: Store) -> None:
    """Store three rounds: b is late in the first and joins the second, whose first attempt
    fails."""
    begun_run(store)
    selected(store, FIRST)
    for client_id in ("a", "c"):
        store.set_member(FIRST, client_id, MemberState.RECEIVED, update=UPDATE)
    store.commit_round(replace(commit(FIRST, ["a", "c"]), late=[LATE]))
    store.add_late_update(FIRST, "b", UPDATE)
    failed, second = AttemptKey(RUN.run_id, 2, 1), AttemptKey(RUN.run_id, 2, 2)
    selected(store, failed)
    store.abandon_attempt(failed, "too few")
    store.append_to_roster(RUN.run_id, ["d"])
    store.begin_attempt(second, [0, 1, 2, 3], AT)
    store.add_question(second, 0, {"kind": "loss"})
    store.add_answers(second, 0, {"kind": "loss"}, {"a": 0.5})
    store.set_cohort(second, [("a", "h1", "because"), ("d", "h2", "new")])
    store.set_member(second, "d", MemberState.RECEIVED, update=UPDATE)
    joined = replace(LATE, state=LateState.JOINED, joined_round=2, weight=0.5, update=UPDATE)
    store.commit_round(replace(commit(second, ["d"]), late=[joined]))
    committed(store, AttemptKey(RUN.run_id, 3, 1))


def copies(store: Store) -> list[Tables]:
    """Return the copies as read from a file; the roster is copied as it grew."""
    found = [
        store.copy_round(RUN.run_id, number, roster_from=roster_from)
        for number, roster_from in ((1, 0), (2, 3), (3, 4))
    ]
    return [json.loads(json.dumps(each)) for each in found]


def rows_in(url: str) -> Mapping[str, Sequence[Mapping[str, Any]]]:
    """Return all rows of runs, without the states of the runs."""
    engine = create_engine(url)
    with engine.connect() as connection:
        found = {}
        for table in OF_RUNS:
            rows = connection.execute(select(table).order_by(*table.primary_key.columns))
            found[table.name] = [dict(row._mapping) for row in rows]
    engine.dispose()
    for row in found[schema.runs.name]:
        for name in ("state", "reason", "changed_at"):
            del row[name]
    return found


def test_round_copies_restore_a_run_into_an_empty_database(url: str, another_url: str) -> None:
    with Store.open(url) as store:
        eventful(store)
        made = copies(store)
        before = store.rounds(RUN.run_id)
    with Store.open(another_url) as empty:
        empty.put_run(made[0]["runs"][0], AT)
        assert empty.run(RUN.run_id).state is RunState.STOPPED
        for number, tables in enumerate(made, 1):
            empty.put_round(RUN.run_id, number, tables)
        empty.end_put_back(RUN.run_id, "rebuilt", AT)
        assert empty.rounds(RUN.run_id) == before
        assert empty.run(RUN.run_id).state is RunState.FINISHED  # all three rounds are committed
    assert rows_in(another_url) == rows_in(url)


def test_round_copies_replace_the_open_attempt_of_an_older_database(
    url: str, another_url: str
) -> None:
    with Store.open(url) as store:
        eventful(store)
        made = copies(store)
    with Store.open(another_url) as older:
        older.put_run(made[0]["runs"][0], AT)
        older.put_round(RUN.run_id, 1, made[0])
        selected(older, AttemptKey(RUN.run_id, 2, 1))
        with pytest.raises(StorageError, match=r"round 3 of run ab12 can't follow round 1"):
            older.put_round(RUN.run_id, 3, made[2])
        for number in (2, 3):
            older.put_round(RUN.run_id, number, made[number - 1])
        assert older.current_attempt(RUN.run_id) is None
    assert rows_in(another_url) == rows_in(url)


def test_late_update_that_later_round_copies_omit_is_dropped(url: str, another_url: str) -> None:
    with Store.open(url) as store:
        begun_run(store)
        selected(store, FIRST)
        store.set_member(FIRST, "a", MemberState.RECEIVED, update=UPDATE)
        store.commit_round(replace(commit(FIRST, ["a"]), late=[LATE]))
        first = store.copy_round(RUN.run_id, 1, roster_from=0)
        store.set_late([replace(LATE, state=LateState.DROPPED)])
        committed(store, AttemptKey(RUN.run_id, 2, 1))
        second = store.copy_round(RUN.run_id, 2, roster_from=3)
    with Store.open(another_url) as empty:
        empty.put_run(first["runs"][0], AT)
        empty.put_round(RUN.run_id, 1, first)
        assert [each.client_id for each in empty.awaited(RUN.run_id)] == ["b"]
        empty.put_round(RUN.run_id, 2, second)
        assert empty.awaited(RUN.run_id) == []


def test_restored_run_gets_a_new_number_if_its_own_is_taken(url: str, another_url: str) -> None:
    with Store.open(url) as store:
        begun_run(store)
        committed(store, FIRST)
        tables = store.copy_round(RUN.run_id, 1, roster_from=0)
    with Store.open(another_url) as busy:
        begun_run(busy, "other")
        busy.put_run(tables["runs"][0], AT)
        assert [(row.run_id, row.number) for row in busy.runs()] == [("ab12", 2), ("other", 1)]
