"""The models of a run: the current one, results of attempts, and deletion."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from support.populations import population

from potluck.server.live.models import Models, RoundModel, States
from potluck.server.plan.plan import draw_up
from potluck.server.reduce.model_work import ModelWork
from potluck.server.selection import Population
from potluck.server.state import State
from potluck.server.store.model_files import ModelFiles, ModelVersion
from potluck.server.strategy import Strategy

RUN_FILE = '[task]\nname = "digits"\nclients = 4\n'
BEGUN = States(selector=State(scalars={"s": 0}), strategy=State(scalars={"t": 0}))
COMMITTED = States(selector=State(scalars={"s": 1}), strategy=State(scalars={"t": 1}))


@pytest.fixture
def files(tmp_path: Path) -> ModelFiles:
    folder = tmp_path / "models"
    folder.mkdir()
    return ModelFiles(folder)


def models(files: ModelFiles, run_file: str = RUN_FILE) -> Models:
    plan = draw_up(run_file, source="test")
    work = ModelWork(plan, files, None, threads=1)
    return Models(plan, work, files, work.initial_model(), BEGUN)


def moved(files: ModelFiles, model: ModelVersion, step: float) -> ModelVersion:
    """Write and return the same model with `step` added to one of its numbers."""
    with files.opened(model.blake3) as file:
        arrays = {name: np.array(array) for name, array in file.arrays.items()}
    next(array for array in arrays.values() if array.dtype == np.float32).flat[0] += step
    digest = files.write(arrays)
    return ModelVersion(blake3=digest.blake3, size=digest.size, renditions=())


def result_of(model: ModelVersion) -> RoundModel:
    return RoundModel(model=model, strategy_state=COMMITTED.strategy)


def test_result_before_any_round_is_the_current_model(files: ModelFiles) -> None:
    run = models(files)
    assert run.result == RoundModel(model=run.current, strategy_state=BEGUN.strategy)
    assert run.digests == run.current.digests


def test_committed_result_becomes_the_current_model(files: ModelFiles) -> None:
    run = models(files)
    first, second = run.current, moved(files, run.current, 0.5)
    run.result = result_of(second)
    assert run.current == first
    run.commit(COMMITTED)
    assert (run.current, run.states) == (second, COMMITTED)


def test_new_attempt_deletes_the_result_of_the_previous_attempt(files: ModelFiles) -> None:
    run = models(files)
    dropped = moved(files, run.current, 0.5)
    files.needed(run.current.digests)
    run.result = result_of(dropped)
    run.begin_attempt()
    assert run.result == RoundModel(model=run.current, strategy_state=BEGUN.strategy)
    files.delete({dropped.blake3})
    assert not files.path(dropped.blake3).exists()
    assert files.existing(run.current.blake3).is_file()


async def test_norm_of_the_last_model_change_is_measured_once(files: ModelFiles) -> None:
    run = models(files)
    assert await run.last_step() is None
    first = run.current
    run.result = result_of(moved(files, first, 0.5))
    run.commit(COMMITTED)
    assert first.digests <= run.digests  # kept until its change is measured
    norm = await run.last_step()
    assert norm is not None
    assert math.isclose(norm, 0.5, rel_tol=1e-5)
    assert run.digests == run.current.digests
    assert await run.last_step() is None


def test_new_roster_initialises_the_selector_state(files: ModelFiles) -> None:
    run = models(files, '[selector]\nname = "oort"\n' + RUN_FILE)
    clients = population(3)
    run.start_selector(clients)
    expected = draw_up('[selector]\nname = "oort"\n' + RUN_FILE, source="test")
    assert run.states.selector.scalars == expected.selector.init(clients).scalars
    assert run.states.strategy is BEGUN.strategy


async def test_strategy_without_profiles_uses_its_committed_state(files: ModelFiles) -> None:
    run = models(files)
    assert await run.enrolled(3, lambda: pytest.fail("profiles were read")) is BEGUN.strategy


async def test_clients_are_enrolled_once_for_each_roster_and_state(files: ModelFiles) -> None:
    enrolled: list[tuple[State, int]] = []

    class Enrols:
        parts = True
        needs_profiles = False

        def enrol(self, state: State, clients: Population, seed: int) -> State:
            enrolled.append((state, len(clients)))
            return State(scalars={"clients": len(clients), "seed": seed})

    made = models(files)
    plan = replace(draw_up(RUN_FILE, source="test"), strategy=cast(Strategy, Enrols()))
    run = Models(plan, made.work, files, made.current, BEGUN)
    for clients in (3, 3, 5):
        found = await run.enrolled(clients, partial(population, clients))
        assert found.scalars["clients"] == clients
    run.commit(COMMITTED)
    await run.enrolled(5, lambda: population(5))
    assert enrolled == [(BEGUN.strategy, 3), (BEGUN.strategy, 5), (COMMITTED.strategy, 5)]
