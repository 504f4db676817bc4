"""Updates that try to dominate the model: with too many samples, or with absurd numbers.

A coordinator process, two honest hosts with 32 samples each, and a third that lies.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from grpc import StatusCode as Status
from numpy.typing import NDArray
from support.federation import Federation, crash_federation
from support.raw_host import RawHost, training_of, whole

from potluck.common.tensors.tensor_files import open_tensors, write_tensors
from potluck.deploy.operator.model_download import download_model
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1 import operator_pb2, transfer_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")

ME = "client-2"
SAMPLES = 32
MOST_SAMPLES = 1 << 40
INCLUDED = operator_pb2.MEMBER_STATE_INCLUDED
FAILED = operator_pb2.MEMBER_STATE_FAILED


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def federation(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Federation]:
    async with crash_federation(
        tmp_path_factory.mktemp("updates"), clients=3, hosts=3, count=3, rounds=1, start_hosts=False
    ) as federation:
        for number in (0, 1):
            await federation.processes.start_host(number)
        await federation.until_attending(2)
        yield federation


@contextlib.asynccontextmanager
async def told_to_train(
    federation: Federation, *assignments: str
) -> AsyncIterator[tuple[str, RawHost, rpc.Instruction]]:
    """Start a run whose cohort contains the lying host; return its id, the host and the
    instruction."""
    async with (
        RawHost.of(federation.files.hosts[2]) as host,
        host.attending(ME) as call,
    ):
        run_id = await federation.start_run('strategy.name="fedavg"', *assignments)
        yield run_id, host, await training_of(call, ME, run_id)


def changed(content: bytes, folder: Path, change: Callable[[dict[str, Any]], None]) -> bytes:
    path = folder / "update"
    path.write_bytes(content)
    with open_tensors(path) as file:
        arrays = {name: array.copy() for name, array in file.arrays.items()}
    change(arrays)
    write_tensors(path, arrays)
    return path.read_bytes()


def one_more(arrays: dict[str, Any]) -> None:
    arrays["ballast"] += 1


def absurd(arrays: dict[str, Any]) -> None:
    arrays["ballast"][7] = 3e38


async def ballast_of(federation: Federation, run_id: str, folder: Path) -> NDArray[np.float32]:
    path = folder / "model.safetensors"
    await download_model(federation.operator, run_id, path)
    with open_tensors(path) as file:
        return file.arrays["ballast"].copy()


@pytest.mark.parametrize(
    ("limits", "counts"),
    [
        ([], 100 * SAMPLES),
        (["sample_limits.maximum_multiple=2"], 2 * SAMPLES),
        ([f"sample_limits.maximum={SAMPLES}"], SAMPLES),
    ],
    ids=["by default", "multiple", "maximum"],
)
async def test_excessive_sample_count_gets_a_capped_weight(
    federation: Federation, tmp_path: Path, limits: list[str], counts: int
) -> None:
    report = transfer_pb2.TrainingReport(samples=MOST_SAMPLES, steps=3, seconds=0.1, loss=1.0)
    async with told_to_train(federation, *limits) as (run_id, host, told):
        before = await host.fetch(told.train.model)
        update = changed(before, tmp_path, one_more)
        answer = await host.submit(whole(told.id, ME, update, report=report))
        assert isinstance(answer, rpc.SubmitUpdateResponse)
        await federation.finished(run_id)
    path = tmp_path / "before"
    path.write_bytes(before)
    with open_tensors(path) as file:
        moved = await ballast_of(federation, run_id, tmp_path) - file.arrays["ballast"]
    # No other client changes the ballast, so its difference shows the weight of the lying client.
    assert moved == pytest.approx(counts / (counts + 2 * SAMPLES), rel=1e-5)
    alarm = f"{ME} ({MOST_SAMPLES}, weighted by {counts}); raise the limits"
    assert alarm in federation.files.log("coordinator").read_text()


async def test_absurd_update_is_rejected_and_its_client_is_not_selected_again(
    federation: Federation, tmp_path: Path
) -> None:
    for _ in range(3):
        async with told_to_train(federation) as (run_id, host, told):
            update = changed(await host.fetch(told.train.model), tmp_path, absurd)
            refusal = await host.submit(whole(told.id, ME, update))
            assert refusal == (Status.INVALID_ARGUMENT, "UPDATE_OUT_OF_BOUNDS")
            await federation.finished(run_id)
        [entry] = await federation.history(run_id)
        states = {member.client_id: member.state for member in entry.members}
        assert states == {"client-0": INCLUDED, "client-1": INCLUDED, ME: FAILED}
        assert np.isfinite(await ballast_of(federation, run_id, tmp_path)).all()
    [me] = [one for one in await federation.operator.list_clients() if one.client_id == ME]
    assert me.quarantined
    assert me.quarantine_reason.startswith(
        "3 of the client's updates contained NaN, infinity or numbers"
    )
    async with RawHost.of(federation.files.hosts[2]) as host, host.attending(ME):
        run_id = await federation.start_run("clients_per_round=2", "expected_clients=2", "rounds=3")
        await federation.finished(run_id)
    chosen = {m.client_id for entry in await federation.history(run_id) for m in entry.members}
    assert chosen == {"client-0", "client-1"}
    await federation.operator.set_quarantine(ME, None)
