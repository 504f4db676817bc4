"""Updates that arrive for a real run: accepted, awaited, late or refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.small_runs import RUN_FILE, SmallRun, small_run

from potluck.common.errors import RoundClosedError
from potluck.common.monitoring.metric_labels import SUM
from potluck.server.clock import now
from potluck.server.live.live_status import progress, waiting
from potluck.server.machine import events as rounds
from potluck.server.machine.machine import Phase
from potluck.server.reduce.update_files import SpooledUpdate
from potluck.server.store import Store
from potluck.server.store.records import MemberState, UpdateRow
from potluck.server.updates.update_inbox import UpdateInbox
from potluck.server.updates.update_path import OpenRounds

LATE = RUN_FILE + "[round]\nquorum = 0.5\nlate_updates = {rounds = 2}\n"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(f"sqlite:///{tmp_path / 'store.sqlite3'}") as store:
        yield store


def inbox_of(small: SmallRun) -> UpdateInbox:
    return UpdateInbox(small.run, OpenRounds(small.run))


def update(small: SmallRun, client: str, blake3: str = "0" * 64) -> dict[str, SpooledUpdate]:
    """Return a verified update for the current attempt, by its update id."""
    row = UpdateRow(
        blake3=blake3,
        size=1,
        encoding="float32",
        delta=False,
        compressed=False,
        samples=10,
        steps=1,
        seconds=1.0,
        loss=0.5,
        reports={},
    )
    path = small.run.updates.spool.path(1, 1, client, blake3)
    return {small.run.instruction_id(client): SpooledUpdate(client=client, path=path, row=row)}


def states(small: SmallRun) -> dict[str, MemberState]:
    """Return the stored member states of the current attempt, by client."""
    attempt = small.store.current_attempt("r")
    assert attempt is not None
    return {member.client_id: member.state for member in attempt.members}


async def test_update_is_stored_before_the_round_machine_receives_the_event(
    tmp_path: Path, store: Store
) -> None:
    small = await small_run(tmp_path, store)
    await small.begin_round("a", "b", "c")
    inbox = inbox_of(small)
    small.posted()
    arriving = update(small, "a")
    await inbox.accept(arriving)
    assert small.posted() == [rounds.UpdateArrived("a", 1.0)]
    assert states(small)["a"] is MemberState.RECEIVED
    assert inbox.has("a", "r/1.1/a", "0" * 64)
    assert not inbox.has("a", "r/1.2/a", "0" * 64)
    assert not inbox.has("b", "r/1.1/b", "0" * 64)


async def test_an_update_of_another_attempt_is_refused(tmp_path: Path, store: Store) -> None:
    small = await small_run(tmp_path, store)
    await small.begin_round("a", "b", "c")
    inbox = inbox_of(small)
    inbox.require("a", "r/1.1/a")
    for client, update_id in (("a", "r/1.2/a"), ("a", "r/1.1/b"), ("d", "r/1.1/d")):
        with pytest.raises(RoundClosedError, match="no longer needed"):
            inbox.require(client, update_id)


async def test_failed_client_is_reported_and_no_longer_expected(
    tmp_path: Path, store: Store
) -> None:
    small = await small_run(tmp_path, store)
    await small.begin_round("a", "b", "c")
    inbox = inbox_of(small)
    small.posted()
    inbox.fail("b", "no memory", "OUT_OF_MEMORY")
    [event] = small.posted()
    assert event == rounds.ClientFailed("b", "no memory (OUT_OF_MEMORY)")
    small.handle(event)
    assert not inbox.expects("b", "r/1.1/b")
    assert inbox.expects("a", "r/1.1/a")


async def test_an_update_after_the_deadline_is_late_and_may_join(
    tmp_path: Path, store: Store
) -> None:
    small = await small_run(tmp_path, store, LATE)
    await small.begin_round("a", "b", "c")
    run, inbox = small.run, inbox_of(small)
    for client in "ab":
        await inbox.accept(update(small, client))
    for event in small.posted():
        small.handle(event)
    run.machine.handle(rounds.TimerFired(), now() + run.plan.run_file.round.deadline_seconds + 1)
    assert run.machine.phase is Phase.REDUCING
    assert run.machine.cohort.missed == ["c"]
    run.updates.close_round(run.key, (), ["c"], model_blake3="m" * 64, round_seconds=0.0, work={})
    assert [row.client_id for row in run.updates.late.awaited] == ["c"]
    inbox.fail_late("c", "it broke")
    assert run.updates.late.awaited == []
    assert small.posted() == [rounds.StillTraining(())]


async def test_restarted_run_keeps_its_cohort_and_discards_damaged_updates(
    tmp_path: Path, store: Store
) -> None:
    small = await small_run(tmp_path, store)
    await small.begin_round("a", "b", "c")
    model = small.run.models.current
    await inbox_of(small).accept(update(small, "a"))  # its file is missing, as after a crash
    again = await small_run(tmp_path, store)
    assert again.run.models.current == model
    assert again.run.key == small.run.key
    assert list(again.run.attempt.cohort) == ["a", "b", "c"]
    assert again.run.updates.received == {}
    assert inbox_of(again).expects("a", "r/1.1/a")


async def test_bytes_that_arrived_before_a_restart_are_still_counted(
    tmp_path: Path, store: Store
) -> None:
    """Updates b and c are in one sum, whose file counts once."""
    small = await small_run(tmp_path, store)
    await small.begin_round("a", "b", "c")
    inbox = inbox_of(small)
    await inbox.accept(update(small, "a"))
    summed = {**update(small, "b", "1" * 64), **update(small, "c", "1" * 64)}
    await inbox.accept(
        {
            name: replace(each, row=replace(each.row, encoding=SUM, size=1000))
            for name, each in summed.items()
        }
    )
    again = await small_run(tmp_path, store)
    assert again.run.updates.bytes_up == 1 + 1000


async def test_progress_shows_the_wait_for_clients_and_then_the_round(
    tmp_path: Path, store: Store
) -> None:
    small = await small_run(tmp_path, store)
    assert progress(small.run) is None
    small.handle(rounds.Started())
    wait = waiting(small.run)
    assert wait is not None
    assert wait.what == "0 of 3 clients are connected; waiting for 3 more"
    await small.begin_round("a", "b", "c")
    assert waiting(small.run) is None
    await inbox_of(small).accept(update(small, "a"))
    for event in small.posted():
        small.handle(event)
    shown = progress(small.run)
    assert shown is not None
    assert (shown.round, shown.attempt, shown.phase) == (1, 1, Phase.TRAINING.value)
    assert [member.client_id for member in shown.members] == ["a", "b", "c"]
