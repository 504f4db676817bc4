"""Stored data survives kills of the coordinator and agrees with a reference model of the store."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.stored import AT, COHORT, UPDATE, begun_run, commit, digest

from potluck.common.errors import StorageError
from potluck.server.store import AttemptKey, MemberState, RoundRow, Store

WRITE_UNTIL_KILLED = """
import sys
from potluck.server.store import AttemptKey, MemberState, Store
from support.stored import AT, COHORT, UPDATE, commit

store = Store.open(sys.argv[1])
while True:
    number = store.run("run").committed_rounds + 1
    attempt = store.current_attempt("run")
    if attempt is None:
        key = AttemptKey("run", number, store.last_attempt("run", number) + 1)
        store.begin_attempt(key, range(number), AT)
        print("began", number, flush=True)
    else:
        key = attempt.key
    if attempt is None or not attempt.members:
        store.set_cohort(key, COHORT)
        print("selected", number, flush=True)
    for client_id in ("a", "c"):
        store.set_member(key, client_id, MemberState.RECEIVED, update=UPDATE)
        print("received", number, flush=True)
    store.commit_round(commit(key, ["a", "c"]))
    print("committed", number, flush=True)
"""
KILLS = 8


def test_killed_writer_loses_no_committed_round(sqlite_url: str) -> None:
    with Store.open(sqlite_url) as store:
        begun_run(store, "run")
    known: list[RoundRow] = []
    for kill in range(KILLS):
        said = write_and_kill(sqlite_url, lines=3 + 7 * kill)
        told = max((number for word, number in said if word == "committed"), default=0)
        with Store.open(sqlite_url) as store:
            rounds = store.rounds("run")
            attempt = store.current_attempt("run")
        assert rounds[: len(known)] == known  # earlier commits are unchanged
        assert len(rounds) >= told  # all reported commits are stored
        assert [row.key for row in rounds] == [
            AttemptKey("run", number, 1) for number in range(1, len(rounds) + 1)
        ]
        for row in rounds:
            assert row.model_blake3 == commit(row.key, []).model_blake3
            assert row.selector_scalars == commit(row.key, []).selector_scalars
            assert [member.state for member in row.members] == ["included", "late", "included"]
        if attempt is not None:
            assert attempt.key.round == len(rounds) + 1
            assert len(attempt.members) in (0, len(COHORT))
        known = rounds
    assert len(known) > KILLS


def write_and_kill(url: str, *, lines: int) -> list[tuple[str, int]]:
    """Kill a writing process after `lines` lines of output; return its whole output."""
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITE_UNTIL_KILLED, url],
        env={"PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        text=True,
    )
    with writer:
        assert writer.stdout is not None
        said = [writer.stdout.readline() for _ in range(lines)]
        writer.kill()
        said += writer.stdout.readlines()
    words = [line.split() for line in said if line.endswith("\n")]
    assert len(words) >= lines
    return [(word, int(number)) for word, number in words]


class Remembering(RuleBasedStateMachine):
    """A store, reopened at random, and a reference model of its content."""

    url: str
    runs = 0  # counted over all examples: each gets a new run

    def __init__(self) -> None:
        super().__init__()
        self.store = Store.open(self.url)
        Remembering.runs += 1
        self.run_id = f"run-{Remembering.runs}"
        # Per round: attempt, included clients.
        self.committed: list[tuple[int, tuple[str, ...]]] = []
        self.attempts = 0
        self.open = False
        self.members: dict[str, MemberState] = {}

    def teardown(self) -> None:
        self.store.close()

    @property
    def key(self) -> AttemptKey:
        return AttemptKey(self.run_id, len(self.committed) + 1, self.attempts)

    @initialize()
    def add_run(self) -> None:
        begun_run(self.store, self.run_id)

    @precondition(lambda self: not self.open)
    @rule()
    def begin(self) -> None:
        self.attempts += 1
        self.open = True
        self.members = {}
        self.store.begin_attempt(self.key, [0, 2], AT)

    @precondition(lambda self: self.open and not self.members)
    @rule(size=st.integers(1, 3))
    def choose(self, size: int) -> None:
        self.store.set_cohort(self.key, COHORT[:size])
        self.members = {name: MemberState.SELECTED for name, _, _ in COHORT[:size]}

    @precondition(lambda self: self.open and self.members)
    @rule(
        place=st.integers(0, 2),
        state=st.sampled_from([MemberState.RECEIVED, MemberState.LOST, MemberState.FAILED]),
    )
    def change(self, place: int, state: MemberState) -> None:
        client_id = sorted(self.members)[place % len(self.members)]
        update = UPDATE if state is MemberState.RECEIVED else None
        self.store.set_member(self.key, client_id, state, update=update)
        self.members[client_id] = state

    @precondition(lambda self: self.open)
    @rule()
    def abandon(self) -> None:
        self.store.abandon_attempt(self.key, "no quorum")
        self.open = False

    @precondition(lambda self: self.open and self.members)
    @rule()
    def commit(self) -> None:
        included = self.received()
        self.store.commit_round(commit(self.key, included))
        self.committed.append((self.attempts, included))
        self.attempts, self.open = 0, False

    @precondition(lambda self: self.open and len(self.received()) < len(self.members))
    @rule()
    def commit_too_much(self) -> None:
        with pytest.raises(StorageError, match="has sent no update"):
            self.store.commit_round(commit(self.key, sorted(self.members)))

    @rule(ahead=st.integers(-2, 2))
    def commit_at_another_time(self, ahead: int) -> None:
        key = self.key._replace(round=self.key.round + ahead, attempt=max(self.attempts, 1))
        if self.open and ahead == 0:
            return
        with pytest.raises(StorageError, match="can't be committed"):
            self.store.commit_round(commit(key, []))

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = Store.open(self.url)

    @invariant()
    def remembers(self) -> None:
        rounds = self.store.rounds(self.run_id)
        assert [(row.key.attempt, row.model_blake3) for row in rounds] == [
            (attempt, digest(number)) for number, (attempt, _) in enumerate(self.committed, start=1)
        ]
        for row, (_, included) in zip(rounds, self.committed, strict=True):
            states = {member.client_id: member.state for member in row.members}
            assert included == tuple(
                name for name, state in states.items() if state is MemberState.INCLUDED
            )
            assert not {MemberState.SELECTED, MemberState.RECEIVED} & set(states.values())
        attempt = self.store.current_attempt(self.run_id)
        assert (attempt is not None) == self.open
        if attempt is not None:
            assert attempt.key == self.key
            assert {member.client_id: member.state for member in attempt.members} == self.members
        assert self.store.last_attempt(self.run_id, len(self.committed) + 1) == self.attempts

    def received(self) -> tuple[str, ...]:
        return tuple(
            name for name, state in sorted(self.members.items()) if state is MemberState.RECEIVED
        )


def test_store_agrees_with_a_reference_model_over_random_calls(url: str) -> None:
    machine = type("RememberingHere", (Remembering,), {"url": url})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=15,
            stateful_step_count=20,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
