"""Only a part of a model is sent. All machines already have its base; hosts with another base are
excluded."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from support.federation import Federation, crash_federation, set_values

from potluck.common.errors import ConfigurationError
from potluck.common.tensors.tensor_files import open_tensors, write_tensors
from potluck.deploy.operator.model_download import download_model
from potluck.privacy.coordinator.round_ledger import RoundLedger
from potluck.rpc.v1 import operator_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")

PARAMETERS = 100_000
CANARY = np.float32(0.123456789)
"""Value of every element of the base: a search for a row of such values finds all data with the
base."""
ODD = 2
"""Number of the host whose base (the tensors that aren't trained) differs."""
PART = ('model.trainable=["classifier.*"]', 'model.base="base.safetensors"')


def write_base(folder: Path, value: np.float32) -> None:
    folder.mkdir(exist_ok=True)
    write_tensors(folder / "base.safetensors", {"ballast": np.full(PARAMETERS, value, np.float32)})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def federation(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Federation]:
    folder = tmp_path_factory.mktemp("part")
    write_base(folder / "data", CANARY)
    write_base(folder / "other", np.float32(1))
    async with crash_federation(
        folder,
        clients=6,
        hosts=3,
        count=4,
        rounds=2,
        assignments=[f"task.parameters={PARAMETERS}", *PART],
        coordinator={"data_directory": str(folder / "data")},
        start_hosts=False,
    ) as federation:
        for number, path in enumerate(federation.files.hosts):
            data = folder / ("other" if number == ODD else "data")
            set_values(path, {"data_directory": str(data)})
        await federation.start_hosts()
        await federation.until_attending()
        yield federation


async def test_base_of_the_model_is_neither_sent_nor_stored(
    federation: Federation, tmp_path: Path
) -> None:
    run_id = await federation.start_run()
    await federation.finished(run_id)
    history = await federation.history(run_id)
    assert len(history) == 2
    for each in history:
        clients = len(each.members)
        assert 0 < each.bytes_down < 1000 * clients
        assert 0 < each.bytes_up < 1000 * clients
        hosts = {member.host_id for member in each.members}
        assert f"host-{ODD}" not in hosts
    path = tmp_path / "model.safetensors"
    await download_model(federation.operator, run_id, path)
    with open_tensors(path) as model:
        assert set(model.layout.by_name) == {"classifier.weight", "classifier.bias"}
    trace = np.full(16, CANARY).tobytes()
    folder = federation.files.folder
    held = [path for path in folder.rglob("*") if path.is_file() and trace in path.read_bytes()]
    assert held == []


async def test_coordinator_adds_noise_to_the_trainable_part_only(
    federation: Federation, tmp_path: Path
) -> None:
    noise = ("privacy.unit=client", "privacy.noise=coordinator", "privacy.noise_multiplier=2")
    run_id = await federation.start_run(*noise, "privacy.clip=0.1", "rounds=1")
    await federation.finished(run_id)
    [charged] = RoundLedger(federation.state, run_id).rounds()
    assert len(charged.clients) == 4
    path = tmp_path / "model.safetensors"
    await download_model(federation.operator, run_id, path)
    with open_tensors(path) as model:
        assert set(model.layout.by_name) == {"classifier.weight", "classifier.bias"}


async def test_host_with_another_base_is_excluded(federation: Federation) -> None:
    run_id = await federation.start_run()
    status = await federation.ended(run_id)
    assert status.state == operator_pb2.RUN_STATE_FINISHED, status.reason
    assert "the base model of this machine" in federation.files.log("coordinator").read_text()


async def test_killed_coordinator_gives_the_same_model(federation: Federation) -> None:
    whole = await federation.finished(await federation.start_run())
    run_id = await federation.start_run()
    await federation.until_committed(run_id, 1)
    await federation.kill_coordinator()
    await federation.restart_coordinator()
    assert await federation.finished(run_id) == whole


async def test_base_that_the_coordinator_lacks_is_refused_before_the_run(
    federation: Federation,
) -> None:
    with pytest.raises(ConfigurationError, match=r"can't read .*none\.safetensors"):
        await federation.start_run('model.base="none.safetensors"')
    with pytest.raises(ConfigurationError, match="the run's base has 000000000000"):
        await federation.start_run(f'model.base_blake3="{"0" * 64}"')
