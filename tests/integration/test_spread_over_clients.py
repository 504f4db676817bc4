"""Spread of clients' metrics over real gRPC: the shown values, and values that are not kept."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch
from support.sum_federation import Members, SumFederation, sum_federation

from potluck.client.disclosure.disclosure_policy import DisclosurePolicy
from potluck.common.learning.evaluation import evaluate
from potluck.common.learning.spread import QUANTILES
from potluck.common.monitoring.instruments import Instruments
from potluck.common.monitoring.metric_labels import MeasuredParty
from potluck.common.names import ClientId
from potluck.common.records.round_message import round_of
from potluck.common.tasks.digits import Digits
from potluck.common.tensors.tensor_files import open_tensors
from potluck.deploy.operator.json_view import round_values
from potluck.rpc.v1 import operator_pb2
from potluck.server.store import RunState

pytestmark = pytest.mark.asyncio(loop_scope="module")

CLIENTS = 6
RUN_FILE = """
rounds = 2
clients_per_round = 3
expected_clients = {clients}
task = {{name = "digits", clients = 6, held_out = 0.3, central_test = {central}, alpha = 0.2}}
training = {{steps = 4}}
evaluation = {{spread = true, least_group = {group}}}
"""
WILLING = DisclosurePolicy(held_out_counts=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def federation(
    members: Members, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[SumFederation]:
    folder, instruments = tmp_path_factory.mktemp("spread"), Instruments(MeasuredParty.COORDINATOR)
    members.instruments["coordinator"] = instruments
    async with sum_federation(members, folder, instruments=instruments) as federation:
        await federation.start(disclosure=WILLING)
        yield federation


async def events(federation: SumFederation, run_id: str) -> list[operator_pb2.WatchRunResponse]:
    async with federation.operator() as operator, aclosing(operator.watch_run(run_id)) as watched:
        return [event async for event in watched]


async def last_round(
    federation: SumFederation, run_file: str
) -> tuple[str, operator_pb2.CommittedRound]:
    row = await federation.finished(run_file)
    assert row.state is RunState.FINISHED, row.reason
    seen = await events(federation, row.run_id)
    return row.run_id, [each.committed for each in seen if each.HasField("committed")][-1]


def measured_apart(
    federation: SumFederation, blake3: str, *, central: bool
) -> Mapping[str, Mapping[str, float]]:
    """Return each client's metrics of a stored model, computed outside the run."""
    task = Digits(clients=CLIENTS, held_out=0.3, central_test=central, alpha=0.2)
    network = task.model()
    with open_tensors(
        federation.folder / "coordinator" / "models" / f"{blake3}.safetensors"
    ) as tensors:
        arrays = {name: torch.tensor(array) for name, array in tensors.arrays.items()}
        network.load_state_dict(arrays)
    found = {}
    for name in federation.members.names:
        held_out = task.client_data(ClientId(name), None).held_out
        assert held_out is not None
        device = torch.device("cpu")
        counts = evaluate(network, held_out, classes=10, groups=0, device=device)
        found[name] = counts.means()
    return found


@pytest.mark.parametrize("central", [False, True], ids=["clients", "coordinator-and-clients"])
async def test_spread_weights_every_client_equally(
    federation: SumFederation, central: bool
) -> None:
    run_id, committed = await last_round(
        federation, RUN_FILE.format(clients=CLIENTS, group=5, central=str(central).lower())
    )
    apart = measured_apart(federation, committed.model_blake3, central=central)
    accuracies = sorted(each["accuracy"] for each in apart.values())
    spread = committed.spreads["accuracy"]
    assert spread.clients == CLIENTS
    assert spread.mean == pytest.approx(np.mean(accuracies))
    assert list(spread.quantiles) == pytest.approx(np.quantile(accuracies, QUANTILES))
    assert spread.worst_tenth == pytest.approx(np.mean(accuracies[:2]))
    losses = sorted(each["loss"] for each in apart.values())
    assert committed.spreads["loss"].worst_tenth == pytest.approx(np.mean(losses[-2:]))
    assert set(committed.spreads) == {"accuracy", "loss", "weighted_f1"}
    assert (spread.asked, spread.partial) == (CLIENTS, False)
    behind = committed.coverage["accuracy"]
    assert (behind.clients, behind.asked) == ((0, 0) if central else (CLIENTS, CLIENTS))
    assert behind.samples > 0
    assert not behind.partial
    assert (behind.samples == spread.samples) is not central
    shown = round_values(round_of(committed))["spreads"]["accuracy"]
    assert shown["quantiles"]["0.5"] == pytest.approx(np.median(accuracies))
    exposition = federation.members.instruments["coordinator"].exposition().decode()
    labels = f'measure="accuracy",run="{run_id}"'
    shown = dict(line.rsplit(" ", 1) for line in exposition.splitlines())
    for state, number in (("asked", behind.asked), ("measured", behind.clients)):
        assert float(shown[f'potluck_model_measure_clients{{{labels},state="{state}"}}']) == number
    assert float(shown[f"potluck_model_measure_samples{{{labels}}}"]) == behind.samples
    assert float(shown[f"potluck_model_measure_partial{{{labels}}}"]) == 0
    assert float(shown[f"potluck_model_measuring_clients{{{labels}}}"]) == spread.clients
    assert float(shown[f"potluck_model_measuring_samples{{{labels}}}"]) == spread.samples > 0
    for statistic, value in (("p50", np.median(accuracies)), ("worst_tenth", spread.worst_tenth)):
        [line] = [
            line
            for line in exposition.splitlines()
            if line.startswith("potluck_model_measure_over_clients")
            and 'measure="accuracy"' in line
            and f'statistic="{statistic}"' in line
            and f"{float(value)}" == line.split()[-1]
        ]
        assert line


async def test_models_that_hosts_fetch_for_evaluation_are_counted(
    federation: SumFederation,
) -> None:
    run_file = "seed = 9" + RUN_FILE.format(clients=CLIENTS, group=5, central="false")
    row = await federation.finished(run_file)
    found = [each.committed for each in await events(federation, row.run_id)]
    rounds = [each for each in found if each.round]
    models = federation.folder / "coordinator" / "models"
    size = (models / f"{rounds[-1].model_blake3}.safetensors").stat().st_size
    fetched = [CLIENTS] * len(rounds)
    fetched[0] += len(rounds[0].members)  # the initial model, for training
    assert [each.bytes_down for each in rounds] == [size * count for count in fetched]


async def test_coordinator_keeps_no_metric_of_a_single_client(federation: SumFederation) -> None:
    """Search the coordinator's disk, its database and its metrics."""
    _, committed = await last_round(
        federation, RUN_FILE.format(clients=CLIENTS, group=5, central="false")
    )
    apart = measured_apart(federation, committed.model_blake3, central=False)
    exposition = federation.members.instruments["coordinator"].exposition()
    files = [path for path in (federation.folder / "coordinator").rglob("*") if path.is_file()]
    kept = [path.read_bytes() for path in files] + [exposition]
    known = repr(committed.spreads["loss"].worst_tenth).encode()
    assert any(known in each for each in kept), "the search would find a number that is kept"
    for values in apart.values():
        loss = values["loss"]
        for form in (repr(loss).encode(), struct.pack("<d", loss), struct.pack(">d", loss)):
            assert not any(form in each for each in kept)


async def test_spread_over_too_few_clients_is_not_shown(
    federation: SumFederation, capsys: pytest.CaptureFixture[str]
) -> None:
    row = await federation.finished(
        RUN_FILE.format(clients=CLIENTS, group=CLIENTS + 1, central="false")
    )
    assert row.state is RunState.FINISHED, row.reason
    found = await events(federation, row.run_id)
    rounds = [event.committed for event in found if event.HasField("committed")]
    assert all(each.metrics.HasField("accuracy") and not each.spreads for each in rounds)
    stored = await federation.coordinator.store.call(lambda store: store.rounds(row.run_id))
    assert [each.spreads for each in stored] == [{}, {}]
    said = capsys.readouterr().out
    assert (
        "no spread over clients is shown for round 2: only 6 clients have measured the model"
        in said
    )


async def test_client_that_requires_a_larger_group_is_excluded_with_a_remedy(
    members: Members, tmp_path: Path
) -> None:
    strict = DisclosurePolicy(held_out_counts=True, least_group=20)
    async with sum_federation(members, tmp_path) as federation:
        await federation.start(members.names[:5], disclosure=WILLING)
        await federation.start(members.names[5:], disclosure=strict)
        row = await federation.finished(RUN_FILE.format(clients=CLIENTS, group=5, central="false"))
        call = federation.coordinator.store.call
        [left_out] = await call(lambda store: store.left_out(row.run_id))
        assert left_out.client_id == "client-5"
        assert "over 5 clients: `least_group` is 20 in" in left_out.trouble
        assert "set evaluation.least_group = 20 in the run file" in left_out.trouble
        rounds = await call(lambda store: store.rounds(row.run_id))
        assert [each.spreads["accuracy"].clients for each in rounds] == [5, 5]
        async with federation.operator() as operator:
            [shown] = [each for each in await operator.list_runs() if each.run_id == row.run_id]
        watched = await events(federation, row.run_id)
        for status in (shown, watched[0].status, watched[-1].status):
            assert status.left_out.startswith("1 client excluded: client 'client-5'"), status
