"""Masked updates over real gRPC: real client agents, each on a host of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from numpy.typing import NDArray
from support.federation import until
from support.sum_federation import Members, SumFederation, sum_federation

from potluck.common.tensors import open_tensors
from potluck.server.store import RunState

pytestmark = pytest.mark.asyncio(loop_scope="module")

CLIENTS = 6
RUN_FILE = f"""
rounds = 2
count = {CLIENTS}
roster = {CLIENTS}
task = {{name = "digits", clients = {CLIENTS}}}
training = {{epochs = 1}}
"""
MASKED = "secure_aggregation = true\n"


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Members:
    return Members.make(tmp_path_factory.mktemp("members"), CLIENTS)


@pytest_asyncio.fixture(loop_scope="module")
async def federation(members: Members, tmp_path: Path) -> AsyncIterator[SumFederation]:
    async with sum_federation(members, tmp_path) as federation:
        await federation.start()
        yield federation


async def weights(federation: SumFederation, run_id: str) -> dict[str, NDArray[Any]]:
    """The last model of a run."""
    _, path = await federation.coordinator.model_of(run_id, 0)
    with open_tensors(path) as file:
        return {name: array.copy() for name, array in file.arrays.items()}


async def test_a_masked_run_is_the_open_one_within_the_bound(federation: SumFederation) -> None:
    masked = await federation.finished(MASKED + RUN_FILE)
    assert masked.state is RunState.FINISHED, masked.reason
    opened = await federation.finished(RUN_FILE)
    one, other = await weights(federation, masked.run_id), await weights(federation, opened.run_id)
    for name, array in one.items():
        assert np.abs(array - other[name]).max() < 1e-6, name
    for client in federation.members.names:
        await until(partial(federation.has_released, client))


@pytest.mark.parametrize(
    "strategy",
    [
        '"fedavgm"',
        '"fedadam"',
        '"fedyogi"',
        '"fedadagrad"',
        '"fednova", momentum = 0.5',
        '"scaffold"',
        '"scaffold", weights = "samples"',
        '"scaffold", step = "fedavgm"',
    ],
)
async def test_strategies_that_average_have_the_model_they_would_have(
    federation: SumFederation, strategy: str
) -> None:
    """With clients of unequal size, a proximal term, and steps that differ."""
    run_file = RUN_FILE.replace(f"clients = {CLIENTS}}}", f"clients = {CLIENTS}, alpha = 0.5}}")
    run_file += f"masking.weight_cap = 1000\nstrategy = {{name = {strategy}}}\n"
    run_file += 'objective = {name = "fedprox", mu = 0.01}\n'
    masked = await federation.finished(MASKED + run_file)
    assert masked.state is RunState.FINISHED, masked.reason
    opened = await federation.finished(run_file)
    assert opened.state is RunState.FINISHED, opened.reason
    one, other = await weights(federation, masked.run_id), await weights(federation, opened.run_id)
    for name, array in one.items():
        assert np.abs(array - other[name]).max() < 1e-4, name
