"""Strategies with state end with the same model after kills; and cases in which clients lose state.

All tests share one federation; each starts runs of its own, always with the same seed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from numpy.typing import NDArray
from support.federation import Federation, crash_federation, until

from potluck.common.errors import ConfigurationError
from potluck.common.tensors.tensor_files import open_tensors
from potluck.rpc.v1 import operator_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")
INCLUDED = operator_pb2.MEMBER_STATE_INCLUDED
FAILED = operator_pb2.MEMBER_STATE_FAILED


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Federation]:
    async with crash_federation(
        tmp_path_factory.mktemp("strategies"),
        rounds=4,
        assignments=["training.momentum=0.5"],
        disclosure={"exact_label_counts": True},
    ) as federation:
        yield federation


@pytest_asyncio.fixture(loop_scope="module")
async def federation(shared: Federation) -> Federation:
    shared.points.clear()
    return shared


def named(strategy: str, **options: Any) -> list[str]:
    return [f'strategy.name="{strategy}"', *(f"strategy.{k}={v}" for k, v in options.items())]


CONCATENATING = [
    *named("fedconcat", groups=2, rounds=2),
    'profiles.disclosure="exact"',
    'model.name="concatenation"',
    "model.groups=2",
    'model.of={name="perceptron", inputs=4, hidden=[8], classes=3}',
]


def several(strategy: str, **options: Any) -> list[str]:
    """Return settings of a strategy with one model per client, trained on the coordinator."""
    return [
        *named(strategy, clients=6, batch_size=8, **options),
        'model.name="ensemble"',
        "model.members=6",
        'model.of={name="perceptron", inputs=4, hidden=[8], classes=3}',
    ]


async def killed_twice(federation: Federation, strategy: list[str]) -> str:
    """Start a run; kill the coordinator after the first commit and before the second."""
    federation.points.hold("observe")
    run_id = await federation.start_run(*strategy)
    await until(lambda: federation.points.reached("observe"))
    federation.points.kill("select")  # in round 2; clients may not know yet how round 1 ended
    federation.points.release()
    assert await federation.coordinator.ended() == 137
    federation.points.kill("observe")  # after the reduction of round 2
    await federation.restart_coordinator()
    assert await federation.coordinator.ended() == 137
    await federation.restart_coordinator()
    return run_id


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(named("scaffold"), id="scaffold"),
        pytest.param(named("fedavgm"), id="fedavgm", marks=pytest.mark.slow),
        pytest.param(
            named("fedawe", model='"clients"', clip=0.5), id="fedawe", marks=pytest.mark.slow
        ),
        pytest.param(named("fedbio", eta=5.0), id="fedbio", marks=pytest.mark.slow),
        pytest.param(CONCATENATING, id="fedconcat", marks=pytest.mark.slow),
        pytest.param(named("rhfl"), id="rhfl", marks=pytest.mark.slow),
        pytest.param(
            ["rounds=2", *several("rhfl-logits")], id="rhfl-logits", marks=pytest.mark.slow
        ),
        pytest.param(named("fedadam"), id="fedadam", marks=pytest.mark.slow),
        pytest.param(
            named("scaffold", step='"fedavgm"'), id="scaffold-fedavgm", marks=pytest.mark.slow
        ),
    ],
)
async def test_killed_coordinator_resumes_with_the_state_of_the_strategy(
    federation: Federation, strategy: list[str]
) -> None:
    undisturbed = await federation.start_run(*strategy)
    wanted = await federation.finished(undisturbed)
    run_id = await killed_twice(federation, strategy)
    assert await federation.finished(run_id) == wanted
    histories = [await federation.history(each) for each in (undisturbed, run_id)]
    digests = [[entry.model_blake3 for entry in each] for each in histories]
    assert digests[0] == digests[1]
    assert {m.state for each in histories for entry in each for m in entry.members} == {INCLUDED}
    models = {entry.model_blake3 for entry in histories[0]}
    assert len(models) == len(histories[0]) > 1, "the strategy did not move the model"
    if "scaffold" in strategy[0]:
        for each in (undisturbed, run_id):
            await until_agreed(federation, each)


DISTILLING = ["rounds=2", *named("distilling", steps=40, check_every=10, batch_size=8)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "strategy", "another"),
    [
        pytest.param("distil", DISTILLING, named("fedavg"), id="feddf"),
        pytest.param(
            "align",
            ["rounds=2", *several("aligning")],
            several("rhfl-logits", learning_rate=0.01),
            id="rhfl-logits",
        ),
    ],
)
async def test_killed_training_on_the_coordinator_restarts_and_gives_the_same_model(
    federation: Federation, point: str, strategy: list[str], another: list[str]
) -> None:
    wanted = await federation.finished(await federation.start_run(*strategy))
    await until(lambda: trainings() == [])
    federation.points.kill(point)  # kill the process that trains, once
    federation.points.hold("observe")  # after the training of round 1
    run_id = await federation.start_run(*strategy)
    await until(lambda: federation.points.reached("observe"))
    assert not federation.points.spare(point), "it was not killed"
    federation.points.hold(point)
    federation.points.release("observe")
    [process] = trainings()
    await until(lambda: federation.points.reached(point))
    assert trainings() == [process], "round 2 did not use the process of round 1"
    await federation.kill_coordinator()
    await until(lambda: trainings() == [])
    federation.points.release()
    await federation.restart_coordinator()
    assert await federation.finished(run_id) == wanted
    other = await federation.finished(await federation.start_run("rounds=2", *another))
    assert wanted != other


async def test_strategy_that_trains_on_the_coordinator_needs_public_data(
    federation: Federation,
) -> None:
    with pytest.raises(ConfigurationError, match="task 'digits' has none; set `public` of"):
        await federation.start_run('task.name="digits"', *named("feddf"))


@pytest.mark.slow
async def test_training_on_the_coordinator_is_reported_and_stopped_with_its_run(
    federation: Federation,
) -> None:
    federation.points.hold("distil")
    run_id = await federation.start_run(*DISTILLING)
    await until(lambda: federation.points.reached("distil"))
    events = federation.operator.watch_run(run_id)
    async for event in events:
        if event.progress.HasField("trained") and event.progress.trained == 0.25:
            break
    await events.aclose()
    assert (await federation.status(run_id)).state == operator_pb2.RUN_STATE_RUNNING
    await federation.operator.stop_run(run_id)
    assert (await federation.ended(run_id)).state == operator_pb2.RUN_STATE_STOPPED
    await until(lambda: trainings() == [])
    federation.points.release()


def trainings() -> list[int]:
    """Return this test's processes that train on a coordinator."""
    folder = os.environ["POTLUCK_POINTS"].encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            trains = b"potluck.server.reduce.training_process" in path.read_bytes()
            if trains and folder in path.with_name("environ").read_bytes():
                found.append(int(path.parent.name))
    return found


async def until_agreed(federation: Federation, run_id: str) -> None:
    """Wait until the clients' committed control variates add up to the coordinator's sums.

    c is their mean.
    """

    def agreed() -> bool:
        theirs = committed_controls(federation.files.folder, run_id)
        ours = remembered_sums(federation.state, run_id)
        return bool(theirs) and all(
            np.allclose(sum(each[name] for each in theirs.values()), total, rtol=1e-4, atol=1e-6)
            for name, total in ours.items()
        )

    await until(agreed, "clients and coordinator agree on the control variates")
    assert any(
        np.abs(total).max() > 0 for total in remembered_sums(federation.state, run_id).values()
    )


def committed_controls(folder: Path, run_id: str) -> dict[str, dict[str, NDArray[Any]]]:
    """Return control variates by client and tensor, from the hosts' state directories."""
    found: dict[str, dict[str, NDArray[Any]]] = {}
    for path in folder.glob("host-*/kept/*.json"):
        record = json.loads(path.read_text())
        if record["run_id"] == run_id and record["committed"]:
            name = hashlib.sha256(record["committed"].encode()).hexdigest()[:40]
            [states] = path.parent.glob(f"{name}.*.safetensors")
            with open_tensors(states) as file:
                found[record["client_id"]] = {
                    n.removeprefix("auxiliary/control/"): a.copy() for n, a in file.arrays.items()
                }
    return found


def remembered_sums(state: Path, run_id: str) -> dict[str, NDArray[np.float64]]:
    """Return sums by tensor, from the coordinator's newest state."""
    with sqlite3.connect(f"file:{state / 'potluck.sqlite3'}?mode=ro", uri=True) as connection:
        query = "SELECT state_blake3 FROM rounds WHERE run_id = ? ORDER BY round DESC LIMIT 1"
        [blake3] = connection.execute(query, (run_id,)).fetchone()
    [path] = state.glob(f"**/{blake3}.safetensors")
    with open_tensors(path) as file:
        start = "strategy/sum/"
        return {
            name.removeprefix(start): array.copy()
            for name, array in file.arrays.items()
            if name.startswith(start)
        }


async def lose_state(federation: Federation, host: int) -> None:
    """Kill a host and restart it without the state of its clients."""
    await federation.kill_host(host)
    await federation.until_attending(len(federation.files.hosts) - 1)
    for path in federation.files.folder.glob(f"host-{host}/kept"):
        shutil.rmtree(path)
    await federation.processes.start_host(host)
    await federation.until_attending()


async def run_with_a_loss(federation: Federation, strategy: list[str]) -> str:
    """Start a run of all clients; delete a host's state directory between rounds 2 and 3."""
    everybody = ["clients_per_round=6", "expected_clients=6", *strategy]
    federation.points.hold("observe")
    run_id = await federation.start_run(*everybody)
    await until(lambda: federation.points.reached("observe"))
    federation.points.hold("select")
    federation.points.release("observe")
    await federation.until_committed(run_id, 1)
    await until(lambda: federation.points.reached("select"))
    await lose_state(federation, 0)
    federation.points.release()
    return run_id


@pytest.mark.slow
async def test_client_that_lost_its_state_is_excluded_with_the_reason(
    federation: Federation,
) -> None:
    run_id = await run_with_a_loss(federation, named("scaffold"))
    await federation.finished(run_id)
    history = await federation.history(run_id)
    for entry in history[1:]:
        lost = {m.client_id: m.trouble for m in entry.members if m.state != INCLUDED}
        assert len(lost) == 2, lost
        assert all("has lost the state" in trouble for trouble in lost.values())
        assert all("CLIENT_STATE_LOST" in trouble for trouble in lost.values())


@pytest.mark.slow
async def test_client_state_kept_by_the_coordinator_survives_a_lost_host_disk(
    federation: Federation,
) -> None:
    strategy = named("scaffold", keeper='"coordinator"')
    undisturbed = await federation.start_run("clients_per_round=6", "expected_clients=6", *strategy)
    wanted = await federation.finished(undisturbed)
    run_id = await run_with_a_loss(federation, strategy)
    assert await federation.finished(run_id) == wanted
    by_clients = await federation.start_run(
        "clients_per_round=6", "expected_clients=6", *named("scaffold")
    )
    assert await federation.finished(by_clients) == wanted, "who keeps them makes no difference"


@pytest.mark.slow
async def test_personal_models_survive_kills_of_coordinator_and_host(
    federation: Federation,
) -> None:
    """After any kill, clients end with the same personal models and the same metrics."""
    ditto = ['personal.method="ditto"', "task.central=false", "evaluation.fine_tune_epochs=1"]
    undisturbed = await federation.start_run(*ditto)
    wanted = await federation.finished(undisturbed)
    run_id = await killed_twice(federation, ditto)
    assert await federation.finished(run_id) == wanted
    federation.points.kill("train-client-0")
    with_a_killed_host = await federation.start_run(
        "clients_per_round=6", "expected_clients=6", *ditto
    )
    assert await federation.processes.hosts[0].ended() == 137
    await federation.processes.start_host(0)
    everybody = await federation.finished(with_a_killed_host)
    again = await federation.start_run("clients_per_round=6", "expected_clients=6", *ditto)
    assert await federation.finished(again) == everybody
    for one, other in ((undisturbed, run_id), (with_a_killed_host, again)):
        kept = [committed_controls(federation.files.folder, each) for each in (one, other)]
        assert kept[0].keys() == kept[1].keys()
        assert len(kept[0]) >= 4
        for client, tensors in kept[0].items():
            for name, tensor in tensors.items():
                assert np.array_equal(tensor, kept[1][client][name]), (client, name)
        measured = [
            [dict(entry.metrics.others) for entry in await federation.history(each)]
            for each in (one, other)
        ]
        assert measured[0] == measured[1]
        assert {"personal_accuracy", "tuned_accuracy"} <= measured[0][-1].keys()
