"""Tensors that stay with clients survive kills of either side and match the current model."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from support.federation import Federation, crash_federation, until

from potluck.common.errors import ConfigurationError
from potluck.common.tensors.tensor_files import open_tensors
from potluck.deploy.operator.model_download import download_model
from potluck.rpc.v1 import operator_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")
CLIENTS = 6
INCLUDED = operator_pb2.MEMBER_STATE_INCLUDED
KEPT = "classifier.weight"
SCAFFOLD = 'strategy.name="scaffold"'


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Federation]:
    async with crash_federation(
        tmp_path_factory.mktemp("kept"),
        clients=CLIENTS,
        hosts=3,
        count=4,
        rounds=3,
        assignments=[
            "task.central=false",
            "training.momentum=0.5",
            "training.learning_rate=0.3",
            f'model.keep=["{KEPT}"]',
        ],
    ) as federation:
        yield federation


def kept(federation: Federation, run_id: str) -> dict[str, bytes]:
    """Return the tensor that each client keeps of its last update, after a run that included
    all."""
    found: dict[str, bytes] = {}
    for path in federation.files.folder.glob("host-*/kept/*.json"):
        record = json.loads(path.read_text())
        # An included update may still be pending on the host.
        last = record["pending"] or record["committed"]
        if record["run_id"] == run_id and last:
            name = hashlib.sha256(last.encode()).hexdigest()[:40]
            for file in path.parent.glob(f"{name}.*.safetensors"):
                with open_tensors(file) as tensors:
                    if KEPT in tensors.layout.by_name:
                        found[record["client_id"]] = tensors.arrays[KEPT].tobytes()
    return found


async def outcome(federation: Federation, run_id: str) -> tuple[list[tuple[str, float]], object]:
    """Return each round's model and accuracy on the clients, and the tensors kept at the end."""
    await federation.finished(run_id)
    history = await federation.history(run_id)
    members = [member for entry in history for member in entry.members]
    assert {member.state for member in members} == {INCLUDED}
    assert set(kept(federation, run_id)) == {member.client_id for member in members}
    rounds = [(entry.model_blake3, entry.metrics.accuracy) for entry in history]
    return rounds, kept(federation, run_id)


@pytest.mark.parametrize("strategy", [(), (SCAFFOLD,)], ids=["fedavg", "scaffold"])
async def test_kills_change_neither_the_model_nor_the_tensors_kept_by_clients(
    federation: Federation, strategy: tuple[str, ...]
) -> None:
    run_id = await federation.start_run(*strategy)
    undisturbed = await outcome(federation, run_id)
    history = await federation.history(run_id)
    assert len({blake3 for blake3, _ in undisturbed[0]}) == 3
    own = undisturbed[1]
    assert isinstance(own, dict)
    assert len(set(own.values())) == len(own) >= 4, "each has its own"
    [first, *_] = history[0].members
    host, client = int(first.host_id.rpartition("-")[2]), first.client_id
    federation.points.kill(f"train-{client}")
    federation.points.kill("observe")  # round 1 is evaluated, and not committed
    run_id = await federation.start_run(*strategy)
    assert await federation.processes.hosts[host].ended() == 137
    await federation.processes.start_host(host)
    assert await federation.coordinator.ended() == 137
    federation.points.hold("select")
    await federation.restart_coordinator()
    await until(lambda: federation.points.reached("select"))
    await federation.kill_host(host)  # between two rounds
    await federation.processes.start_host(host)
    federation.points.release()
    assert await outcome(federation, run_id) == undisturbed


async def test_downloaded_model_omits_the_tensors_kept_by_clients(
    federation: Federation, tmp_path: Path
) -> None:
    run_id = await federation.start_run("rounds=1")
    await federation.finished(run_id)
    path = tmp_path / "model.safetensors"
    await download_model(federation.operator, run_id, path)
    with open_tensors(path) as model:
        assert set(model.layout.by_name) == {"ballast", "classifier.bias"}
    [only] = await federation.history(run_id)
    assert 0 < only.bytes_up < 4 * 4 * (1000 + 3) + 4000


async def test_client_that_lost_its_kept_tensors_reports_it(federation: Federation) -> None:
    federation.points.hold("observe")
    run_id = await federation.start_run(
        "clients_per_round=6", "expected_clients=6", "round.quorum=0.5"
    )
    await until(lambda: federation.points.reached("observe"))
    federation.points.hold("select")
    federation.points.release("observe")
    await federation.until_committed(run_id, 1)
    await until(lambda: federation.points.reached("select"))
    await federation.kill_host(0)
    await federation.until_attending(2)
    for path in federation.files.folder.glob("host-0/kept"):
        shutil.rmtree(path)
    await federation.processes.start_host(0)
    await federation.until_attending()
    federation.points.release()
    await federation.finished(run_id)
    for entry in (await federation.history(run_id))[1:]:
        lost = [m.trouble for m in entry.members if m.state != INCLUDED]
        assert len(lost) == 2, lost
        assert all("has lost the state" in trouble for trouble in lost)


async def test_invalid_tensor_patterns_are_refused_before_the_run(federation: Federation) -> None:
    for patterns, why in {
        '["head.*"]': r"matches 'head\.\*' of `keep`",
        '["*"]': "matches all tensors",
    }.items():
        with pytest.raises(ConfigurationError, match=why):
            await federation.start_run(f"model.keep={patterns}")
    with pytest.raises(ConfigurationError, match="matches both `trainable`"):
        await federation.start_run('model.trainable=["classifier.*"]')
