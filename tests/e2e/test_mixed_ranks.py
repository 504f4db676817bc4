"""Clients with adapters of different ranks: the model changes by the mean of their updates."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from numpy.typing import NDArray
from support.federation import Federation
from support.profile_federation import profile_federation

from potluck.common.errors import ConfigurationError
from potluck.common.tensors.tensor_files import open_tensors
from potluck.deploy.operator.model_download import download_model
from potluck.rpc.v1 import operator_pb2

PLUGINS = Path(__file__).parents[1] / "support" / "lora_plugins"
pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

W, A, B = "0.base_layer.weight", "0.lora_A.default.weight", "0.lora_B.default.weight"
ROUNDS = 3
Arrays = dict[str, NDArray[Any]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def federation(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Federation]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(PLUGINS)
        patch.setenv("PYTHONPATH", str(PLUGINS))
        async with profile_federation(
            tmp_path_factory.mktemp("ranks"),
            task="mixed-ranks",
            selector="uniform",
            clients=6,
            count=4,
            rounds=ROUNDS,
            assignments=['strategy.name="lora-stacking"', "retention.keep_every=1"],
        ) as found:
            await found.until_attending()
            yield found


def read(path: Path) -> Arrays:
    with open_tensors(path) as file:
        return {name: np.array(array) for name, array in file.arrays.items()}


async def model_after(federation: Federation, run_id: str, number: int, folder: Path) -> Arrays:
    path = folder / f"{number}.safetensors"
    await download_model(federation.operator, run_id, path, round_number=number)
    return read(path)


async def test_weights_change_by_the_weighted_mean_of_adapter_products(
    federation: Federation, tmp_path: Path
) -> None:
    others = set(federation.files.folder.rglob("*.trained"))
    run_id = await federation.start_run()
    await federation.finished(run_id)
    written = set(federation.files.folder.rglob("*.trained")) - others
    factors = {path.name: read(path) for path in written}
    history = await federation.history(run_id)
    before = await model_after(federation, run_id, 1, tmp_path)
    for entry in history[1:]:
        after = await model_after(federation, run_id, entry.round, tmp_path)
        samples = sum(member.samples for member in entry.members)
        expected, ranks = before[W].astype(np.float64), set()
        for member in entry.members:
            assert member.state == operator_pb2.MEMBER_STATE_INCLUDED
            trained = factors[f"{member.client_id}.{entry.round}.trained"]
            product = trained[B].astype(np.float64) @ trained[A].astype(np.float64)
            ranks.add(int(np.linalg.matrix_rank(product)))
            expected += member.samples / samples * product
        assert len(ranks) > 1
        np.testing.assert_allclose(after[W], expected, rtol=1e-5, atol=1e-5)
        assert not after[B].any()
        before = after
    assert all(entry.bytes_up < 4 * before[W].nbytes for entry in history), "it is not sent back"


async def test_killed_coordinator_gives_the_same_model(federation: Federation) -> None:
    whole = await federation.finished(await federation.start_run())
    run_id = await federation.start_run()
    await federation.until_committed(run_id, 1)
    await federation.kill_coordinator()
    await federation.restart_coordinator()
    assert await federation.finished(run_id) == whole


@pytest.mark.parametrize("encoding", ["bfloat16", "int8"])
async def test_adapter_updates_are_uploaded_in_any_encoding(
    federation: Federation, encoding: str
) -> None:
    forms = ["transport.up.delta=true", "transport.up.compress=true"]
    run_id = await federation.start_run(f'transport.up.encoding="{encoding}"', *forms)
    await federation.finished(run_id)
    first, *_, last = await federation.history(run_id)
    assert last.metrics.loss < first.metrics.loss


async def test_client_that_trains_a_frozen_tensor_reports_it(federation: Federation) -> None:
    run_id = await federation.start_run("task.spoils=true", "round.attempts=1")
    status = await federation.ended(run_id)
    assert status.state == operator_pb2.RUN_STATE_FAILED
    logs = [federation.files.log(f"host-{number}").read_text() for number in range(2)]
    assert any(
        f"has trained tensor '{W}', which only the coordinator may change" in log for log in logs
    )


@pytest.mark.parametrize(
    ("assignments", "why"),
    [
        (["secure_aggregation=true"], "lora-stacking and secure aggregation are not compatible"),
        (
            ['model.trainable=["1.*"]'],
            "receive no adapters of this model; wrap",
        ),
        (['model.trainable=["*lora_?.*"]'], "'0.base_layer.weight' is not sent to clients; add"),
        (['task.name="digits"'], "receive no adapters of this model; wrap"),
    ],
)
async def test_model_without_stackable_adapters_is_refused_before_the_run(
    federation: Federation, assignments: list[str], why: str
) -> None:
    with pytest.raises(ConfigurationError, match=why) as refusal:
        await federation.start_run(*assignments)
    assert "\n" not in refusal.value.message
