"""The cost of a run does not grow with its past rounds or with earlier runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import Engine, create_engine, event, update
from support.stored import AT, RUN, add_rounds, begun_run, commit, committed, digest, selected

from potluck.common.run_file.runfile import parse_run_file
from potluck.server.service.retention import Tidying
from potluck.server.store import AttemptKey, BestSoFar, RunState, Store
from potluck.server.store.model_files import ModelFiles
from potluck.server.store.sql import schema

RUN_FILE = """
rounds = 100000
clients_per_round = 3
seed = 7
[task]
name = "digits"
[retention]
keep_last = 3
"""
STEPS = 10
"""Number of SQLite instructions between two calls of the progress handler."""


@pytest.fixture
def instructions() -> Iterator[Callable[[], int]]:
    """Yield a function that returns the number of instructions that SQLite has executed: a cost
    that does not depend on the machine."""
    count = 0

    def more() -> int:
        nonlocal count
        count += 1
        return 0

    def watch(connection: Any, _: object) -> None:
        connection.set_progress_handler(more, STEPS)

    event.listen(Engine, "connect", watch)
    yield lambda: count
    event.remove(Engine, "connect", watch)


@contextmanager
def long_run(url: str, folder: Path, rounds: int) -> Iterator[tuple[Store, Tidying, ModelFiles]]:
    """Open the store of a run with `rounds` committed rounds after a restart of the coordinator."""
    with Store.open(url) as store:
        begun_run(store)
    add_rounds(url, RUN.run_id, range(1, rounds + 1))
    folder.mkdir()
    with Store.open(url) as store:

        async def in_store(call: Callable[[Store], Any]) -> Any:
            return call(store)

        files = ModelFiles(folder)
        tidying = Tidying(files, in_store, set)
        tidying.begin(RUN.run_id, rounds)
        yield store, tidying, files


async def one_more_round(store: Store, tidying: Tidying, number: int) -> None:
    """Store and commit one round, and clean up after it, as the coordinator does."""
    committed(store, AttemptKey(RUN.run_id, number, 1))
    store.last_round(RUN.run_id)
    store.run(RUN.run_id)
    retention = parse_run_file(RUN_FILE, source="test").retention
    await tidying.after_commit(RUN.run_id, retention, number)


async def test_cost_of_a_commit_does_not_grow_with_past_rounds(
    tmp_path: Path, instructions: Callable[[], int]
) -> None:
    costs: list[int] = []
    for rounds in (10, 2000):
        folder = tmp_path / str(rounds)
        folder.mkdir()
        with long_run(f"sqlite:///{folder}/db", folder / "models", rounds) as (store, tidying, _):
            await one_more_round(store, tidying, rounds + 1)
            before = instructions()
            await one_more_round(store, tidying, rounds + 2)
            costs.append(instructions() - before)
    few, many = costs
    assert few > 0
    assert many <= 1.1 * few, costs


def test_cost_of_resuming_does_not_grow_with_past_rounds(
    tmp_path: Path, instructions: Callable[[], int]
) -> None:
    costs: list[int] = []
    for rounds in (10, 2000):
        folder = tmp_path / str(rounds)
        folder.mkdir()
        with long_run(f"sqlite:///{folder}/db", folder / "models", rounds) as (store, _, _):
            before = instructions()
            [row] = store.unfinished_runs()
            store.roster(row.run_id)
            store.last_round(row.run_id)
            found = store.participation(row.run_id)
            store.current_attempt(row.run_id)
            costs.append(instructions() - before)
            assert [each.picks for each in found] == [rounds] * 3
    few, many = costs
    assert few > 0
    assert many <= 1.1 * few, costs


def test_cost_of_finding_unfinished_runs_does_not_grow_with_ended_runs(
    tmp_path: Path, instructions: Callable[[], int]
) -> None:
    costs: list[int] = []
    for runs in (10, 1000):
        with Store.open(f"sqlite:///{tmp_path / str(runs)}") as store:
            for number in range(runs):
                store.add_run(replace(RUN, run_id=f"old-{number}"))
                store.set_run_state(f"old-{number}", RunState.FINISHED, "", AT)
            store.add_run(RUN)
            before = instructions()
            assert [row.run_id for row in store.unfinished_runs()] == [RUN.run_id]
            costs.append(instructions() - before)
    few, many = costs
    assert many <= 1.1 * few + 1, costs


# Which files go ------------------------------------------------------------------------------


def there(folder: Path) -> set[str]:
    return {path.stem for path in folder.iterdir()}


def put(files: ModelFiles, *numbers: int) -> None:
    for number in numbers:
        files.path(digest(number)).touch()


async def test_model_files_are_deleted_once_newer_rounds_exceed_the_retention(
    url: str, tmp_path: Path
) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    retention = parse_run_file(RUN_FILE + "keep_every = 4\n", source="test").retention
    with Store.open(url) as store:
        for run_id in (RUN.run_id, "other"):  # both runs start from the same model
            run = replace(RUN, run_id=run_id, run_file=RUN_FILE + "keep_every = 4\n")
            store.add_run(run)
            store.append_to_roster(run_id, ["a", "b", "c"])
            store.set_initial_model(run_id, digest(0), AT)

        async def in_store(call: Callable[[Store], Any]) -> Any:
            return call(store)

        files = ModelFiles(folder)
        tidying = Tidying(files, in_store, set)
        tidying.begin(RUN.run_id, 0)
        put(files, 0, 7777)
        for number in range(1, 8):
            committed(store, AttemptKey(RUN.run_id, number, 1))
            put(files, number, 1000 + number)
            await tidying.after_commit(RUN.run_id, retention, number)
            models = {n for n in range(number + 1) if n > number - 3 or n % 4 == 0}
            assert there(folder) == {digest(n) for n in {*models, 1000 + number, 7777}}
        # The next coordinator finds and deletes files that a killed one left behind.
        put(files, 1, 1003, 8888)
        later = Tidying(files, in_store, lambda: {digest(8888)})
        await later.look_at(files.clear_leftovers())
        assert there(folder) == {digest(n) for n in {0, 4, 5, 6, 7, 1007, 8888}}
        # If two clean-ups were missed, the next one deletes their files too.
        committed(store, AttemptKey(RUN.run_id, 8, 1))
        committed(store, AttemptKey(RUN.run_id, 9, 1))
        put(files, 8, 9, 1008, 1009)
        await tidying.after_commit(RUN.run_id, retention, 9)
        assert there(folder) == {digest(n) for n in {0, 4, 7, 8, 9, 1009}}


async def test_best_model_file_is_kept_until_a_better_model_is_committed(
    url: str, tmp_path: Path
) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    run_file = RUN_FILE.replace("keep_last = 3", "keep_last = 1")
    retention = parse_run_file(run_file, source="test").retention
    with Store.open(url) as store:
        store.add_run(replace(RUN, run_file=run_file))
        store.append_to_roster(RUN.run_id, ["a", "b", "c"])
        store.set_initial_model(RUN.run_id, digest(0), AT)

        async def in_store(call: Callable[[Store], Any]) -> Any:
            return call(store)

        files = ModelFiles(folder)
        tidying = Tidying(files, in_store, set)
        tidying.begin(RUN.run_id, 0)
        for number, best in enumerate((1, 2, 2, 2, 5, 5), 1):
            key = AttemptKey(RUN.run_id, number, 1)
            selected(store, key)
            so_far = BestSoFar(measure="loss", round=best, value=1.0, mark=1.0)
            store.commit_round(replace(commit(key, []), best=so_far, state_blake3=None))
            put(files, number)
            await tidying.after_commit(RUN.run_id, retention, number)
            assert there(folder) == {digest(best), digest(number)}
        # The next coordinator checks all files, and keeps the best and the last model.
        put(files, 2, 4)
        await Tidying(files, in_store, set).look_at(files.clear_leftovers())
        assert there(folder) == {digest(5), digest(6)}
        await Tidying(files, in_store, set).look_at(store.delete_runs([RUN.run_id]))
        assert there(folder) == set()


async def test_model_file_is_kept_while_any_run_retains_it(url: str, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    retention = parse_run_file(RUN_FILE, source="test").retention
    with Store.open(url) as store:
        for run_id in (RUN.run_id, "other"):
            store.add_run(replace(RUN, run_id=run_id, run_file=RUN_FILE))
            store.append_to_roster(run_id, ["a", "b", "c"])
            store.set_initial_model(run_id, digest(0), AT)

        async def in_store(call: Callable[[Store], Any]) -> Any:
            return call(store)

        files = ModelFiles(folder)
        tidying = Tidying(files, in_store, set)
        for run_id in (RUN.run_id, "other"):
            tidying.begin(run_id, 0)
        put(files, 0)
        for run_id in (RUN.run_id, "other"):
            for number in range(1, 4):
                assert digest(0) in there(folder)
                committed(store, AttemptKey(run_id, number, 1))
                await tidying.after_commit(run_id, retention, number)
        assert digest(0) not in there(folder)


async def test_model_file_that_a_resumed_run_rewrites_is_not_deleted(
    url: str, tmp_path: Path
) -> None:
    """The coordinator cleans up old files while a resumed run writes one of them again."""
    with Store.open(url) as store:
        store.add_run(replace(RUN, run_file=RUN_FILE))
        store.append_to_roster(RUN.run_id, ["a", "b", "c"])
        store.set_initial_model(RUN.run_id, digest(0), AT)
        for number in range(1, 6):
            committed(store, AttemptKey(RUN.run_id, number, 1))

        async def in_store(call: Callable[[Store], Any]) -> Any:
            return call(store)

        folder = tmp_path / "models"
        folder.mkdir()
        files = ModelFiles(folder)
        model = files.write({"weight": np.ones(3, np.float32)}).blake3
        engine = create_engine(url)
        with engine.begin() as connection:
            first = schema.rounds.c.round == 1
            connection.execute(update(schema.rounds).where(first).values(model_blake3=model))
        engine.dispose()
        found = files.clear_leftovers()
        assert found == {model}
        tidying = Tidying(files, in_store, set)
        await tidying.look_at(found)
        assert files.path(model).is_file()  # written by a run that has not committed it yet
        files.let_go([model])
        await tidying.look_at(found)
        assert not files.path(model).is_file()


async def test_model_that_runs_resumed_from_is_deleted_once_no_run_retains_it(
    url: str, tmp_path: Path
) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    retention = parse_run_file(RUN_FILE, source="test").retention
    with Store.open(url) as store:
        for run_id in (RUN.run_id, "other"):
            store.add_run(replace(RUN, run_id=run_id, run_file=RUN_FILE))
            store.append_to_roster(run_id, ["a", "b", "c"])

        async def in_store(call: Callable[[Store], Any]) -> Any:
            return call(store)

        files = ModelFiles(folder)
        model = files.write({"weight": np.ones(3, np.float32)}).blake3
        for run_id in (RUN.run_id, "other"):
            store.set_initial_model(run_id, model, AT)
        again = ModelFiles(folder)
        tidying = Tidying(again, in_store, set)
        tidying.begin(RUN.run_id, 0)
        assert again.published(model).blake3 == model
        await tidying.look_at(again.clear_leftovers())
        for run_id in (RUN.run_id, "other"):
            for number in range(1, 4):
                assert again.path(model).is_file()
                committed(store, AttemptKey(run_id, number, 1))
                await tidying.after_commit(run_id, retention, number)
        assert not again.path(model).is_file()
