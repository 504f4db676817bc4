"""The loop of a run: failures of actions, and the order of events and timers."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import Any

import pytest
from support.small_runs import SmallRun, small_run

from potluck.common.errors import PluginError, StorageError
from potluck.server.machine import events
from potluck.server.machine.machine import Phase
from potluck.server.run import round_loop
from potluck.server.run.round_loop import RoundLoop
from potluck.server.store import Store

CLIENTS = ("a", "b", "c")


class Loop(RoundLoop):
    """A loop that keeps the actions that end the run."""

    def __init__(self, small: SmallRun) -> None:
        self.ended: list[events.End] = []
        super().__init__(small.run, self._keep)

    async def _keep(self, action: events.End) -> None:
        self.ended.append(action)


async def looped(folder: Path, store: Store) -> Loop:
    """Return the loop of a new run, which three clients have joined."""
    loop = Loop(await small_run(folder, store))
    loop.run.post(events.Joined(CLIENTS, {client: client for client in CLIENTS}))
    return loop


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (PluginError("the selector has an error"), "the selector has an error"),
        (
            StorageError("the disk failed; replace it"),
            "the disk failed; replace it; then `potluck resume r`",
        ),
        (OSError(errno.ENOSPC, "No space left"), "then `potluck resume r`"),
        (ValueError("no such column"), "unexpected ValueError: no such column"),
    ],
)
async def test_failure_of_a_slow_action_ends_the_run_with_its_reason(
    error: Exception, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def failing(*_: Any) -> None:
        raise error

    monkeypatch.setattr(round_loop, "select", failing)
    with Store.open(f"sqlite:///{tmp_path / 'store.sqlite3'}") as store:
        loop = await looped(tmp_path, store)
        await loop.go()
        await loop.settle()
    [ended] = loop.ended
    assert ended.ending is events.RunEnding.FAILED
    assert reason in ended.reason
    assert loop.run.machine.phase is Phase.ENDED


async def test_events_are_handled_while_a_slow_action_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = asyncio.Event()

    async def endless(*_: Any) -> None:
        begun.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(round_loop, "select", endless)
    with Store.open(f"sqlite:///{tmp_path / 'store.sqlite3'}") as store:
        loop = await looped(tmp_path, store)
        running = asyncio.create_task(loop.go())
        await begun.wait()
        loop.run.post(events.StopRequested())
        await running
        await loop.settle()  # ends the slow action
    assert [each.ending for each in loop.ended] == [events.RunEnding.STOPPED]


async def test_failure_outside_the_loop_ends_the_run_once(tmp_path: Path) -> None:
    with Store.open(f"sqlite:///{tmp_path / 'store.sqlite3'}") as store:
        loop = await looped(tmp_path, store)
        await loop.fail("the database is full")
        await loop.settle()
    assert loop.ended == [events.End(events.RunEnding.FAILED, "the database is full")]


async def test_event_that_arrives_before_the_deadline_has_precedence_over_the_timer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline has passed, but an update that arrived in time is still being stored."""
    with Store.open(f"sqlite:///{tmp_path / 'store.sqlite3'}") as store:
        loop = await looped(tmp_path, store)
        loop.run.events.get_nowait()
        stored = events.Left(("a",))

        async def recorded() -> None:
            loop.run.post(stored)

        monkeypatch.setattr(loop.run.machine, "next_wakeup", lambda: 0.0)
        assert await loop._next_event() == events.TimerFired()
        monkeypatch.setattr(loop.inbox, "recorded", recorded)
        assert await loop._next_event() is stored


async def test_model_files_of_a_run_are_in_use(tmp_path: Path) -> None:
    with Store.open(f"sqlite:///{tmp_path / 'store.sqlite3'}") as store:
        loop = await looped(tmp_path, store)
        assert loop.run.models.current.blake3 in loop.files_in_use()
        assert loop.files_in_use() <= {path.stem for path in (tmp_path / "models").iterdir()}
