"""Runs that continue after the coordinator ended."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.small_runs import small_run

from potluck.common.errors import StorageError
from potluck.server.machine import events
from potluck.server.machine.machine import Phase
from potluck.server.store import Store


async def test_first_model_is_made_once(tmp_path: Path) -> None:
    with Store.open(f"sqlite:///{tmp_path / 'store.sqlite3'}") as store:
        first = await small_run(tmp_path, store)
        again = await small_run(tmp_path, store)
        assert again.run.models.current.blake3 == first.run.models.current.blake3
        assert store.run("r").initial_model_blake3 == first.run.models.current.blake3
    assert again.run.machine.phase is Phase.WAITING


async def test_run_without_its_model_file_names_the_file_and_the_remedy(tmp_path: Path) -> None:
    with Store.open(f"sqlite:///{tmp_path / 'store.sqlite3'}") as store:
        await small_run(tmp_path, store)
        for path in (tmp_path / "models").iterdir():
            path.unlink()
        with pytest.raises(StorageError, match="continue after round 0; restore the file") as error:
            await small_run(tmp_path, store)
    assert error.value.metadata["path"].startswith(str(tmp_path / "models"))


async def test_attempt_continues_with_its_cohort_and_reasons(tmp_path: Path) -> None:
    with Store.open(f"sqlite:///{tmp_path / 'store.sqlite3'}") as store:
        before = await small_run(tmp_path, store)
        await before.begin_round("c", "a", "b")
        small = await small_run(tmp_path, store)
        small.handle(events.Started())
    after = small.run
    assert after.key == before.run.key
    assert after.machine.phase is Phase.TRAINING
    assert list(after.attempt.cohort) == ["c", "a", "b"]
    assert {member.reason for member in after.attempt.cohort.values()} == {"chance"}
    assert all(after.machine.cohort.waits_for(client) for client in "abc")


async def test_abandoned_attempt_is_not_continued(tmp_path: Path) -> None:
    with Store.open(f"sqlite:///{tmp_path / 'store.sqlite3'}") as store:
        before = await small_run(tmp_path, store)
        await before.begin_round("c", "a", "b")
        store.abandon_attempt(before.run.key, "too few updates")
        after = (await small_run(tmp_path, store)).run
    assert after.machine.phase is Phase.WAITING
    assert (after.machine.round, after.machine.attempt) == (1, 2)
