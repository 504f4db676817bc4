"""A run with early stopping ends in the same round with the same best model after any kill.

All tests share the hosts; each starts a run of its own with the same seed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
import tomlkit
from safetensors import safe_open
from support.federation import Federation, crash_federation, until

from potluck.common.errors import NotFoundError
from potluck.common.tensors.tensor_files import file_digest
from potluck.deploy.operator.model_download import download_model
from potluck.rpc.v1 import operator_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")

STOP = (
    "rounds=30",
    "stop.measure=loss",
    "stop.patience=2",
    "stop.minimum_delta=0.02",
    "retention.keep_last=1",
)


@dataclass(frozen=True)
class End:
    """Final state of a run."""

    reason: str
    best: operator_pb2.BestModel
    models: list[str]
    coverage: list[operator_pb2.Coverage]


async def end_of(federation: Federation, run_id: str) -> End:
    status = await federation.ended(run_id)
    assert status.state == operator_pb2.RUN_STATE_FINISHED, status.reason
    history = await federation.history(run_id)
    assert len(history) == status.committed_rounds < status.rounds
    return End(
        status.reason,
        status.best,
        [each.model_blake3 for each in history],
        [each.coverage["loss"] for each in history],
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Federation]:
    folder = tmp_path_factory.mktemp("stop")
    async with crash_federation(folder, clients=4, hosts=2, count=2, assignments=STOP) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(shared: Federation) -> End:
    return await end_of(shared, await shared.start_run())


def kept(federation: Federation) -> set[str]:
    return {path.stem for path in federation.state.glob("models/*.safetensors")}


async def test_run_stops_early_when_the_metric_stops_improving(undisturbed: End) -> None:
    best, last = undisturbed.best, len(undisturbed.models)
    assert undisturbed.reason.startswith("stopped early: loss has not improved by more than 0.02")
    assert best.stalled == 2
    assert 1 <= best.round <= last
    assert best.model_blake3 == undisturbed.models[best.round - 1]
    assert best.coverage == undisturbed.coverage[best.round - 1]
    assert best.coverage.samples > 0  # samples of the coordinator


@pytest.mark.parametrize("moment", ["before-commit_round", "after-commit_round"])
@pytest.mark.parametrize("back", [0, 1])
async def test_coordinator_killed_around_a_commit_stops_in_the_same_round(
    federation: Federation, undisturbed: End, moment: str, back: int
) -> None:
    """Kill around the last commit, after which only the run's end is missing, and around the commit
    before the last."""
    federation.points.note_boundaries()
    federation.points.kill(f"{moment}-{len(undisturbed.models) - back}")
    run_id = await federation.start_run()
    assert await federation.coordinator.ended() == 137
    await federation.restart_coordinator()
    assert await end_of(federation, run_id) == undisturbed


async def test_coordinator_killed_during_training_stops_in_the_same_round(
    federation: Federation, undisturbed: End
) -> None:
    run_id = await federation.before_round_two()
    trainings = [f"train-client-{number}" for number in range(4)]
    federation.points.hold(*trainings)
    federation.points.release("select")
    await until(lambda: any(federation.points.reached(each) for each in trainings))
    await federation.kill_coordinator()
    federation.points.release()
    await federation.restart_coordinator()
    assert await end_of(federation, run_id) == undisturbed


async def test_best_model_is_kept_downloaded_and_deleted_with_its_run(
    federation: Federation, undisturbed: End, tmp_path: Path
) -> None:
    run_id = await federation.start_run("seed=8")
    other = await end_of(federation, run_id)
    assert {other.best.model_blake3, other.models[-1]} <= kept(federation)
    older = set(other.models) - {other.best.model_blake3, other.models[-1]}
    assert not older & kept(federation)
    path = tmp_path / "best.safetensors"
    found = await download_model(federation.operator, run_id, path, best=True)
    assert found.blake3 == file_digest(path).blake3 == other.best.model_blake3
    assert (found.origin.round, found.origin.best.measure) == (other.best.round, "loss")
    await download_model(federation.operator, run_id, path, best=True, describe=True)
    with safe_open(path, "np") as file:
        assert file.metadata()["potluck.best_of"] == "loss"
    await federation.operator.delete_run(run_id)
    assert not set(other.models) & kept(federation)
    assert undisturbed.best.model_blake3 in kept(federation)  # models of earlier runs stay


async def test_requesting_the_best_model_of_a_run_without_metric_is_an_error(
    federation: Federation, tmp_path: Path
) -> None:
    plain = tomlkit.parse(federation.files.run_file)
    plain.remove("stop")
    plain["rounds"] = 1
    run_id = await federation.operator.start_run(tomlkit.dumps(plain))
    await federation.ended(run_id)
    with pytest.raises(NotFoundError, match="its run file sets no metric"):
        await download_model(federation.operator, run_id, tmp_path / "best", best=True)
