"""Attempts and committed rounds, on both databases."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.stored import AT, COHORT, RUN, UPDATE, begun_run, commit, committed, digest, selected

from potluck.common.errors import NotFoundError, StorageError
from potluck.common.learning.spread import Coverage
from potluck.server.store import (
    AttemptKey,
    BestSoFar,
    Exchange,
    FileReference,
    MemberChange,
    MemberRow,
    MemberState,
    MemberWork,
    Provenance,
    Store,
)
from potluck.server.store.records import AttemptState
from potluck.server.store.sql.column_types import decode_rows, encode_rows

FIRST = AttemptKey(RUN.run_id, 1, 1)
SECOND = AttemptKey(RUN.run_id, 1, 2)
NEXT = AttemptKey(RUN.run_id, 2, 1)


@pytest.fixture
def begun(store: Store) -> Store:
    begun_run(store)
    return store


def states(store: Store) -> dict[str, MemberState]:
    attempt = store.current_attempt(RUN.run_id)
    assert attempt is not None
    return {member.client_id: member.state for member in attempt.members}


def test_attempt_is_read_back_with_all_its_fields(begun: Store) -> None:
    assert begun.current_attempt(RUN.run_id) is None
    begun.begin_attempt(FIRST, iter([2, 0]), AT)
    attempt = begun.current_attempt(RUN.run_id)
    assert attempt is not None
    assert (attempt.key, attempt.begun_at, attempt.available) == (FIRST, AT, (0, 2))
    assert (attempt.members, attempt.exchanges) == ((), ())
    works = {
        "b": MemberWork(quotas=(0.0, 2.5, math.inf), weight=0.1),
        "c": MemberWork(weight=5e-324, epochs=7, dropped=("0.bias", "ein \N{SNOWMAN}")),
    }
    told = {"a": Provenance(data_epoch=2**53, software="0.1.0"), "b": Provenance(data_epoch=0)}
    begun.set_cohort(FIRST, COHORT, works, told)
    begun.set_member(FIRST, "a", MemberState.RECEIVED, update=UPDATE)
    begun.set_member(FIRST, "b", MemberState.LOST, trouble="connection lost")
    attempt = begun.current_attempt(RUN.run_id)
    assert attempt is not None
    a, b, c = attempt.members
    assert a == MemberRow(
        client_id="a",
        host_id="h1",
        state=MemberState.RECEIVED,
        reason="because",
        trouble=None,
        update=UPDATE,
        provenance=told["a"],
    )
    assert (b.provenance, c.provenance) == (told["b"], Provenance())
    assert (b.state, b.trouble, b.update) == (MemberState.LOST, "connection lost", None)
    assert (c.client_id, c.host_id, c.state) == ("c", "h2", MemberState.SELECTED)
    assert (a.work, b.work, c.work) == (MemberWork(), works["b"], works["c"])


def test_rounds_and_attempts_must_begin_in_order(store: Store) -> None:
    store.add_run(RUN)
    with pytest.raises(StorageError, match="before the initial model"):
        store.begin_attempt(FIRST, [0], AT)
    store.set_initial_model(RUN.run_id, digest(0), AT)
    with pytest.raises(StorageError, match="can't begin after round 0"):
        store.begin_attempt(NEXT, [0], AT)
    with pytest.raises(StorageError, match="can't begin after attempt 0"):
        store.begin_attempt(SECOND, [0], AT)
    store.begin_attempt(FIRST, [0], AT)
    with pytest.raises(StorageError, match="can't begin after attempt 1"):
        store.begin_attempt(FIRST, [0], AT)
    with pytest.raises(StorageError, match="before attempt 1 is abandoned"):
        store.begin_attempt(SECOND, [0], AT)
    assert store.last_attempt(RUN.run_id, 1) == 1
    store.abandon_attempt(FIRST, "no quorum")
    assert store.current_attempt(RUN.run_id) is None
    store.begin_attempt(SECOND, [0], AT)
    assert store.last_attempt(RUN.run_id, 1) == 2
    assert store.last_attempt(RUN.run_id, 2) == 0


def test_abandoned_or_committed_attempt_rejects_changes(begun: Store) -> None:
    selected(begun, FIRST)
    begun.abandon_attempt(FIRST, "no quorum")
    selected(begun, SECOND)
    before = begun.current_attempt(RUN.run_id)
    changes: list[Any] = [
        lambda: begun.abandon_attempt(FIRST, "again"),
        lambda: begun.set_cohort(FIRST, COHORT),
        lambda: begun.set_member(FIRST, "a", MemberState.RECEIVED, update=UPDATE),
        lambda: begun.add_question(FIRST, 0, {}),
        lambda: begun.add_answers(FIRST, 0, {}, {}),
        lambda: begun.commit_round(commit(FIRST, [])),
    ]
    for change in changes:
        with pytest.raises(StorageError, match=r"attempt 1 at round 1 of run ab12.* is not open"):
            change()
    assert begun.current_attempt(RUN.run_id) == before


def test_failed_attempts_of_a_round_are_listed_with_their_members(begun: Store) -> None:
    """Clients that lost their host are avoided only after an attempt that counts."""
    third, fourth = (AttemptKey(RUN.run_id, 1, number) for number in (3, 4))
    ends = (AttemptState.EXCUSED, AttemptState.FAILED, AttemptState.ABANDONED)
    for key, state in zip((FIRST, SECOND, third), ends, strict=True):
        selected(begun, key)
        begun.set_member(key, "a", MemberState.LOST)
        begun.set_member(key, "b", MemberState.LATE)
        begun.abandon_attempt(key, "no quorum", state)
    begun.begin_attempt(fourth, [0], AT)
    excused, failed = begun.failed_attempts(RUN.run_id, 1)
    assert excused.members == {
        "a": MemberState.LOST,
        "b": MemberState.LATE,
        "c": MemberState.SELECTED,
    }
    assert (excused.counts, excused.to_avoid) == (False, {"b"})
    assert (failed.counts, failed.to_avoid) == (True, {"a", "b"})
    assert begun.failed_attempts(RUN.run_id, 2) == []


def test_cohort_of_an_attempt_is_set_once(begun: Store) -> None:
    begun.begin_attempt(FIRST, [0, 1, 2], AT)
    for wrong in ([], [COHORT[0], COHORT[0]]):
        with pytest.raises(StorageError, match="empty or repeats a client"):
            begun.set_cohort(FIRST, wrong)
    begun.set_cohort(FIRST, COHORT)
    with pytest.raises(StorageError, match="already has a cohort"):
        begun.set_cohort(FIRST, [("d", "h", "late")])
    assert list(states(begun)) == ["a", "b", "c"]


def test_member_changes_are_applied_all_or_none(begun: Store) -> None:
    selected(begun, FIRST)
    with pytest.raises(NotFoundError, match="client x is not in the cohort"):
        begun.set_members(
            FIRST,
            [
                MemberChange(client_id="a", state=MemberState.RECEIVED, update=UPDATE),
                MemberChange(client_id="x", state=MemberState.LOST),
            ],
        )
    assert set(states(begun).values()) == {MemberState.SELECTED}
    begun.set_members(
        FIRST,
        [
            MemberChange(client_id="a", state=MemberState.RECEIVED, update=UPDATE),
            MemberChange(client_id="b", state=MemberState.LOST),
        ],
    )
    assert list(states(begun).values()) == ["received", "lost", "selected"]


def test_only_members_in_state_received_have_an_update(begun: Store) -> None:
    selected(begun, FIRST)
    with pytest.raises(StorageError, match=r"can't become received in .* without an update"):
        begun.set_member(FIRST, "a", MemberState.RECEIVED)
    with pytest.raises(StorageError, match=r"can't become late in .* with an update"):
        begun.set_member(FIRST, "a", MemberState.LATE, update=UPDATE)
    with pytest.raises(StorageError, match="can't become included"):
        begun.set_member(FIRST, "a", MemberState.INCLUDED)


@pytest.mark.parametrize("loss", [float("inf"), -1e308, 0.1 + 0.2, None])
def test_floats_are_read_back_exactly(begun: Store, loss: float | None) -> None:
    selected(begun, FIRST)
    begun.set_member(FIRST, "a", MemberState.RECEIVED, update=replace(UPDATE, loss=loss))
    attempt = begun.current_attempt(RUN.run_id)
    assert attempt is not None
    assert attempt.members[0].update == replace(UPDATE, loss=loss)


def test_nan_metrics_and_losses_are_read_back_as_missing(begun: Store) -> None:
    selected(begun, FIRST)
    not_a_number = replace(UPDATE, loss=float("nan"))
    begun.set_member(FIRST, "a", MemberState.RECEIVED, update=not_a_number)
    begun.commit_round(replace(commit(FIRST, ["a"]), metrics={"loss": float("nan")}))
    last = begun.last_round(RUN.run_id)
    assert last is not None
    assert last.metrics == {}
    assert last.members[0].update == replace(UPDATE, loss=None)


def test_questions_and_answers_are_read_back_in_order(begun: Store) -> None:
    begun.begin_attempt(FIRST, [0, 1], AT)
    first, second = {"kind": "loss", "rows": [0, 1]}, {"kind": "cosine", "scale": 0.1}
    begun.add_question(FIRST, 0, first)
    begun.add_question(FIRST, 0, first)
    assert begun.answers(FIRST) == [Exchange(step=0, question=first, answers=None)]
    begun.add_answers(FIRST, 0, first, {"loss": [0.5, float("inf")]})
    begun.add_answers(FIRST, 1, second, {})
    expected = [
        Exchange(step=0, question=first, answers={"loss": [0.5, float("inf")]}),
        Exchange(step=1, question=second, answers={}),
    ]
    assert begun.answers(FIRST) == expected
    attempt = begun.current_attempt(RUN.run_id)
    assert attempt is not None
    assert list(attempt.exchanges) == expected
    with pytest.raises(StorageError, match="already has answers"):
        begun.add_answers(FIRST, 0, first, {"loss": [0.0, 0.0]})
    with pytest.raises(StorageError, match="the selector is not deterministic"):
        begun.add_question(FIRST, 1, first)
    with pytest.raises(StorageError, match="can't be stored"):
        begun.add_question(FIRST, 2, {"rows": {1, 2}})
    assert begun.answers(FIRST) == expected


def test_committed_round_is_read_back_unchanged(begun: Store) -> None:
    assert begun.last_round(RUN.run_id) is None
    committed(begun, FIRST)
    row = begun.last_round(RUN.run_id)
    assert row is not None
    made = commit(FIRST, ["c", "a"])
    of_members = ("included", "set_aside")
    of_round = {name: value for name, value in vars(made).items() if name not in of_members}
    assert {name: getattr(row, name) for name in of_round} == of_round
    assert [(m.client_id, m.state) for m in row.members] == [
        ("a", MemberState.INCLUDED),
        ("b", MemberState.LATE),
        ("c", MemberState.INCLUDED),
    ]
    assert row.members[0].update == UPDATE
    assert row.members[1].trouble == "the round ended without it"
    assert begun.current_attempt(RUN.run_id) is None


def test_commit_keeps_the_states_of_lost_and_failed_members(begun: Store) -> None:
    selected(begun, FIRST)
    begun.set_member(FIRST, "a", MemberState.LOST, trouble="gone")
    begun.set_member(FIRST, "b", MemberState.FAILED, trouble="no data")
    begun.set_member(FIRST, "c", MemberState.RECEIVED, update=UPDATE)
    begun.commit_round(commit(FIRST, []))
    last = begun.last_round(RUN.run_id)
    assert last is not None
    assert [(m.state, m.trouble) for m in last.members] == [
        (MemberState.LOST, "gone"),
        (MemberState.FAILED, "no data"),
        (MemberState.LATE, "the round ended without it"),
    ]


def test_rejected_update_is_stored_as_spared_with_the_reason(begun: Store) -> None:
    selected(begun, FIRST)
    for client_id in ("a", "b"):
        begun.set_member(FIRST, client_id, MemberState.RECEIVED, update=UPDATE)
    begun.commit_round(replace(commit(FIRST, ["a"]), set_aside={"b": "it pulls against the rest"}))
    row = begun.last_round(RUN.run_id)
    assert row is not None
    assert [(member.state, member.trouble) for member in row.members[:2]] == [
        (MemberState.INCLUDED, None),
        (MemberState.SPARED, "it pulls against the rest"),
    ]
    assert row.disclosed_samples == {"a": UPDATE.samples}


def test_sample_counts_are_disclosed_for_included_unmasked_members_only(begun: Store) -> None:
    selected(begun, FIRST)
    masked = replace(UPDATE, samples=0)
    for client_id, sent in (("a", UPDATE), ("b", UPDATE), ("c", masked)):
        begun.set_member(FIRST, client_id, MemberState.RECEIVED, update=sent)
    begun.commit_round(commit(FIRST, ["a", "c"]))
    [row] = begun.rounds(RUN.run_id)
    assert [member.client_id for member in row.included] == ["a", "c"]
    assert row.disclosed_samples == {"a": UPDATE.samples}


def test_rounds_are_committed_in_order_and_once(begun: Store) -> None:
    with pytest.raises(StorageError, match="can't be committed after round 0"):
        begun.commit_round(commit(NEXT, []))
    committed(begun, FIRST)
    with pytest.raises(StorageError, match="can't be committed after round 1"):
        begun.commit_round(commit(FIRST, []))
    with pytest.raises(StorageError, match="it is not open"):
        begun.commit_round(commit(NEXT, []))
    assert [row.key.round for row in begun.rounds(RUN.run_id)] == [1]


@pytest.mark.parametrize(
    ("included", "why"),
    [
        (["a", "b"], "b has sent no update"),
        (["a", "x"], "x has sent no update"),
        (["a", "a"], "one of them is named twice"),
    ],
)
def test_a_refused_commit_changes_nothing(begun: Store, included: list[str], why: str) -> None:
    selected(begun, FIRST)
    begun.set_member(FIRST, "a", MemberState.RECEIVED, update=UPDATE)
    before = begun.current_attempt(RUN.run_id)
    with pytest.raises(StorageError, match=why):
        begun.commit_round(commit(FIRST, included))
    assert begun.current_attempt(RUN.run_id) == before
    assert begun.rounds(RUN.run_id) == []


def test_committed_rounds_list_the_committed_attempt_only(begun: Store) -> None:
    selected(begun, FIRST)
    begun.set_member(FIRST, "b", MemberState.RECEIVED, update=UPDATE)
    begun.abandon_attempt(FIRST, "no quorum")
    committed(begun, SECOND)
    committed(begun, NEXT)
    first, second = begun.rounds(RUN.run_id)
    assert (first.key, second.key) == (SECOND, NEXT)
    assert len(first.members) == len(second.members) == 3
    assert begun.rounds(RUN.run_id, after=1) == [second]
    assert begun.rounds(RUN.run_id, after=2) == []
    assert begun.last_round(RUN.run_id) == second


def test_rounds_and_attempts_of_two_runs_are_separate(begun: Store) -> None:
    begun_run(begun, "other")
    committed(begun, FIRST)
    selected(begun, AttemptKey("other", 1, 1))
    assert begun.rounds("other") == []
    assert begun.current_attempt(RUN.run_id) is None
    committed(begun, NEXT)
    assert [row.key.round for row in begun.rounds(RUN.run_id)] == [1, 2]


def test_model_references_list_each_file_of_each_round(begun: Store) -> None:
    begun.add_run(replace(RUN, run_id="waiting"))
    begun_run(begun, "other")
    committed(begun, FIRST)
    expected = [
        FileReference(run_id=RUN.run_id, round=0, model_blake3=digest(0), state_blake3=None),
        FileReference(
            run_id=RUN.run_id, round=1, model_blake3=digest(1), state_blake3=digest(1001)
        ),
    ]
    assert begun.model_references(RUN.run_id) == expected
    assert begun.model_references(RUN.run_id, first=-3, last=0) == expected[:1]
    assert begun.model_references(RUN.run_id, first=1, last=1) == expected[1:]
    assert begun.model_references(RUN.run_id, first=-3, last=-1) == []


def test_holders_of_a_file_are_all_rounds_that_refer_to_it(begun: Store) -> None:
    begun_run(begun, "other")
    for number in (1, 2):
        committed(begun, AttemptKey(RUN.run_id, number, 1))
    committed(begun, AttemptKey("other", 1, 1))

    def holders(*digests: str) -> list[tuple[str, int, bool, int]]:
        found = begun.holders(digests)
        assert all(each.run_file == RUN.run_file for each in found)
        return sorted((e.run_id, e.round, e.of_state, e.committed_rounds) for e in found)

    assert holders(digest(0)) == [(RUN.run_id, 0, False, 2), ("other", 0, False, 1)]
    assert holders(digest(1)) == [(RUN.run_id, 1, False, 2), ("other", 1, False, 1)]
    assert holders(digest(2), digest(1002), digest(7)) == [
        (RUN.run_id, 2, False, 2),
        (RUN.run_id, 2, True, 2),
    ]
    assert holders() == []


def test_best_round_and_its_coverage_are_read_back(begun: Store) -> None:
    best = BestSoFar(measure="loss", round=1, value=0.1 + 0.2, mark=math.inf, stalled=3)
    behind = {"loss": Coverage(clients=2, asked=3, samples=40, partial=True)}
    selected(begun, FIRST)
    begun.commit_round(replace(commit(FIRST, []), best=best, coverage=behind))
    selected(begun, NEXT)
    begun.commit_round(replace(commit(NEXT, []), best=replace(best, stalled=4)))
    assert [row.best for row in begun.rounds(RUN.run_id)] == [best, replace(best, stalled=4)]
    run = begun.run(RUN.run_id)
    assert (run.best, run.best_model_blake3) == (replace(best, stalled=4), digest(1))
    assert run.best_coverage == behind
    assert {each.best_round for each in begun.holders([digest(0), digest(2)])} == {1}
    assert [each.round for each in begun.best_references(RUN.run_id, first=1, last=2)] == [1]
    # No best round is known yet, only the number of stalled evaluations.
    unknown = BestSoFar(measure="loss", stalled=1)
    third = AttemptKey(RUN.run_id, 3, 1)
    selected(begun, third)
    begun.commit_round(replace(commit(third, []), best=unknown))
    run = begun.run(RUN.run_id)
    assert (run.best, run.best_model_blake3, run.best_coverage) == (unknown, None, {})


def test_participation_lists_picks_samples_and_last_inclusion_of_each_client(begun: Store) -> None:
    selected(begun, FIRST)  # selects a, b, c
    begun.abandon_attempt(FIRST, "no quorum")
    committed(begun, SECOND)  # includes a and c
    begun.begin_attempt(NEXT, [0, 1], AT)
    begun.set_cohort(NEXT, COHORT[:2])
    for client_id, samples in (("a", 0), ("b", 9)):
        update = replace(UPDATE, samples=samples)
        begun.set_member(NEXT, client_id, MemberState.RECEIVED, update=update)
    # The update of b is not included; a's number of samples is masked.
    begun.commit_round(commit(NEXT, ["a"]))
    found = {
        each.client_id: (each.picks, each.samples, each.included_round, each.included_attempt)
        for each in begun.participation(RUN.run_id)
    }
    assert found == {"a": (2, 57, 2, 1), "b": (2, None, None, None), "c": (1, 57, 1, 2)}
    assert begun.participation("other") == []


def test_rounds_are_listed_in_pages(begun: Store) -> None:
    for number in range(1, 6):
        committed(begun, AttemptKey(RUN.run_id, number, 1))
    everything = begun.rounds(RUN.run_id)
    assert begun.rounds(RUN.run_id, limit=2) == everything[:2]
    assert begun.rounds(RUN.run_id, after=2, limit=2) == everything[2:4]
    assert begun.rounds(RUN.run_id, after=4, limit=2) == everything[4:]
    assert begun.round(RUN.run_id, 3) == everything[2]
    assert begun.round(RUN.run_id, 6) is None


def test_number_wider_than_64_bits_is_a_one_line_error(begun: Store) -> None:
    selected(begun, FIRST)
    with pytest.raises(StorageError) as caught:
        begun.commit_round(replace(commit(FIRST, []), bytes_up=2**64))
    assert "\n" not in caught.value.message
    assert begun.last_round(RUN.run_id) is None


@given(rows=st.sets(st.integers(0, 2**40)) | st.sets(st.integers(0, 30)))
def test_encoded_rows_decode_to_the_same_rows(rows: set[int]) -> None:
    assert decode_rows(encode_rows(rows)) == tuple(sorted(rows))


def test_consecutive_rows_are_encoded_as_one_range() -> None:
    assert encode_rows(range(1_000_000)) == "[[0,999999]]"
    assert encode_rows([]) == "[]"
