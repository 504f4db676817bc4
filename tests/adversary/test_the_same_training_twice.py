"""The same training twice: the difference of two sums reveals a client or a single sample.

Two sums over different clients differ by the excluded client. Before inputs were remembered by
their model, a blank in the settings' text or an option without effect made it another training.
Two sums over the same clients revealed single samples if a setting of the trainings or weights
differed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from adversary.conftest import CLIENTS, Scene, attacked
from adversary.proxy import Script
from support.sum_federation import Members

from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.secagg.coordinator import masked_rounds
from potluck.secagg.masked_vectors import METRIC_BOUND
from potluck.server.store import RunRow, RunState

TRAINING = "steps = 5"
TASK = f'name = "digits", clients = {CLIENTS}'


async def trained(
    scene: Scene,
    count: int,
    training: str = TRAINING,
    task: str = TASK,
    masking: str = "",
    strategy: str = "fedavg",
    script: type[Script] = Script,
    metric_bound: float = METRIC_BOUND,
) -> RunRow:
    """Run one round with `count` clients from the same initial model.

    metric_bound: bound on the metrics in the head of each vector.
    """
    scene.liar.script = script()
    with pytest.MonkeyPatch.context() as operator:
        operator.setattr(masked_rounds, "METRIC_BOUND", metric_bound)
        return await scene.federation.finished(
            f"""
        secure_aggregation = true
        rounds = 1
        clients_per_round = {count}
        expected_clients = {CLIENTS}
        task = {{{task}}}
        strategy = {{name = "{strategy}"}}
        training = {{{training}}}
        masking = {{stage_seconds = 20.0{masking}}}
        round = {{deadline_seconds = 60.0, attempts = 1}}
        """
        )


@pytest_asyncio.fixture
async def many_runs(members: Members, tmp_path: Path) -> AsyncIterator[Scene]:
    """Run a federation whose owners allow several runs over the same data."""
    async with attacked(members, tmp_path, disclosure={"masked_runs": 9}) as scene:
        yield scene


class Spaced(Script):
    """Adds blanks without meaning to the JSON of the settings."""

    def to_host(self, host: str, message: rpc.AttendResponse) -> Iterable[rpc.AttendResponse]:
        if message.instruction.WhichOneof("work") == "train":
            work = message.instruction.train
            work.training_json = work.training_json.replace(",", " ,\n")
        return [message]


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        pytest.param({}, True, id="all as before"),
        pytest.param({"script": Spaced}, True, id="a blank"),
        pytest.param({"task": f"{TASK}, alpha = 0.5"}, False, id="an option"),
        pytest.param({"training": "steps = 5, batch_size = 17"}, False, id="a batch size"),
        pytest.param({"masking": ", weight_cap = 9999"}, False, id="a weight bound"),
        pytest.param({"masking": ", clip = 3.9"}, False, id="a clip"),
        pytest.param({"masking": ", bits = 64"}, False, id="bits"),
        pytest.param({"strategy": "fednova"}, False, id="normalisation"),
        pytest.param({"metric_bound": 1e5}, False, id="a bound on metrics"),
    ],
)
async def test_updates_of_one_model_are_summed_over_only_one_set_of_clients(
    many_runs: Scene, changes: dict[str, Any], same: bool
) -> None:
    scene = many_runs
    first = await trained(scene, CLIENTS)
    assert first.state is RunState.FINISHED, first.reason
    without_one = await trained(scene, CLIENTS - 1, **changes)
    assert without_one.state is RunState.FAILED
    assert "refused (released: " in without_one.reason
    again = await trained(scene, CLIENTS, **changes)
    if same:
        assert again.state is RunState.FINISHED, again.reason
    else:
        assert again.state is RunState.FAILED
        assert "in a sum with other settings of training or masking" in again.reason


async def test_second_run_over_the_same_data_is_refused_by_default(scene: Scene) -> None:
    first = await trained(scene, CLIENTS)
    assert first.state is RunState.FINISHED, first.reason
    second = await trained(scene, CLIENTS)
    assert second.state is RunState.FAILED
    assert "are in masked rounds of 1 other run" in second.reason
    assert "masked_runs" in second.reason


async def test_second_run_over_fewer_clients_is_summed_if_owners_allow_it(
    members: Members, tmp_path: Path
) -> None:
    policy = {"sets_per_model": "any", "masked_runs": 2}
    async with attacked(members, tmp_path, disclosure=policy) as scene:
        for count in (CLIENTS, CLIENTS - 1):
            row = await trained(scene, count)
            assert row.state is RunState.FINISHED, row.reason
