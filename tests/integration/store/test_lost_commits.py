"""The journal of commits finds rounds that the database has lost, on both databases."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.stored import RUN, begun_run, committed, digest

from potluck.server.store import AttemptKey, Store
from potluck.server.store.recorded_commits import Commits


def commits(store: Store, path: Path) -> Commits:
    async def in_store(call: Callable[[Store], Any]) -> Any:
        return call(store)

    return Commits(path, in_store)


async def one_more(store: Store, noting: Commits, run_id: str, number: int) -> None:
    committed(store, AttemptKey(run_id, number, 1))
    row = store.last_round(run_id)
    assert row is not None
    await noting.note(row)


async def test_journal_and_database_agree_if_no_commit_was_lost(
    store: Store, tmp_path: Path
) -> None:
    noting = commits(store, tmp_path)
    assert await noting.compare() == {}
    begun_run(store)
    for number in (1, 2):
        await one_more(store, noting, RUN.run_id, number)
    committed(store, AttemptKey(RUN.run_id, 3, 1))  # killed before the journal had it
    assert await commits(store, tmp_path).compare() == {}
    assert (tmp_path / "journal").read_text().count("\n") == 3  # the missing line was added
    assert await commits(store, tmp_path).compare() == {}
    assert (tmp_path / "journal").read_text().count("\n") == 3


async def test_older_database_is_reported_at_each_start_until_accepted(
    url: str, tmp_path: Path
) -> None:
    with Store.open(url) as store:
        noting = commits(store, tmp_path)
        for run_id in (RUN.run_id, "other"):
            begun_run(store, run_id)
            for number in (1, 2, 3):
                await one_more(store, noting, run_id, number)
    # An older database: one run lacks its last round, and the other run is missing.
    with Store.open(f"sqlite:///{tmp_path / 'older.db'}") as behind:
        begun_run(behind)
        for number in (1, 2):
            committed(behind, AttemptKey(RUN.run_id, number, 1))
        later = commits(behind, tmp_path)
        for each in (later, commits(behind, tmp_path)):
            found = await each.compare()
            assert {(e.run_id, e.committed, e.lost) for e in found.values()} == {
                (RUN.run_id, 2, 3),
                ("other", None, 3),
            }
        assert later.spared >= {digest(3), digest(1003)}
        await later.accept(behind.run(RUN.run_id))
        assert [loss.run_id for loss in (await commits(behind, tmp_path).compare()).values()] == [
            "other"
        ]
        await one_more(behind, later, RUN.run_id, 3)
        assert list(await commits(behind, tmp_path).compare()) == ["other"]


async def test_run_continues_if_the_journal_cannot_be_written(store: Store, tmp_path: Path) -> None:
    begun_run(store)
    (tmp_path / "journal").mkdir()
    await one_more(store, commits(store, tmp_path), RUN.run_id, 1)
    assert store.run(RUN.run_id).committed_rounds == 1
