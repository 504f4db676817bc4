"""Masked runs with noise that hides each client, over real gRPC with real client agents."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from numpy.typing import NDArray
from support.federation import until
from support.sum_federation import Members, SumFederation, silent, sum_federation

from potluck.client.disclosure.disclosure_policy import DisclosurePolicy
from potluck.client.private_training import UpdateNoise
from potluck.client.training.local_update import Trained, train_update
from potluck.common.errors import TrainingError
from potluck.common.records.privacy_loss import BUDGET_SPENT
from potluck.privacy.host.host_guard import HostGuard
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.secagg.protocol import MessageType, SessionRecord
from potluck.server.store import RunState

pytestmark = pytest.mark.asyncio(loop_scope="module")

CLIENTS = 7
"""Number of clients. The quorum is then 5, of which 2 may collude, so 3 shares of noise are
certainly secret."""
RUN_FILE = f"""
secure_aggregation = true
rounds = 1
clients_per_round = {CLIENTS}
expected_clients = {CLIENTS}
task = {{name = "digits", clients = {CLIENTS}}}
training = {{epochs = 1, learning_rate = 1e-12}}
evaluation = {{every = 0}}
masking.stage_seconds = 20.0
round = {{deadline_seconds = 20.0, leavers = "drop"}}
"""
TWO_ROUNDS = RUN_FILE.replace("rounds = 1", "rounds = 2")
PRIVACY = '\n[privacy]\nunit = "client"\nclip = 0.5\n'
NOISE = PRIVACY + "noise_multiplier = 4.0\n"
GENEROUS = DisclosurePolicy(training_epsilon=100.0, masked_runs=1000)


@pytest_asyncio.fixture(loop_scope="module")
async def federation(members: Members, tmp_path: Path) -> AsyncIterator[SumFederation]:
    async with sum_federation(members, tmp_path) as federation:
        await federation.start(disclosure=GENEROUS)
        yield federation


def charged(federation: SumFederation, client: str) -> list[dict[str, Any]]:
    path = federation.folder / client.replace("client", "host") / "privacy" / f"{client}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]


async def moved(federation: SumFederation, run_id: str) -> NDArray[np.float64]:
    """Return the difference between a run's last model and that of round 1."""
    vectors = []
    for number in (1, 0):  # 0 stands for the newest
        _, _, blake3, _ = await federation.coordinator.archive.model_of(run_id, number)
        with federation.coordinator.files.opened(blake3) as file:
            arrays = [file.arrays[name].ravel() for name in sorted(file.arrays)]
        vectors.append(np.concatenate(arrays).astype(np.float64))
    return vectors[1] - vectors[0]


async def records(federation: SumFederation, run_id: str) -> list[SessionRecord]:
    sums = [each for each in await federation.stored() if each.run_id == run_id]
    return [SessionRecord.model_validate(each.record) for each in sums]


async def test_sum_has_the_noise_of_surviving_clients_and_each_upload_is_charged(
    federation: SumFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two clients drop out. The learning rate is tiny, so only the noise changes the model."""
    quiet = dict.fromkeys(["client-1", "client-4"], MessageType.ROSTER)
    with silent(monkeypatch, quiet):
        row = await federation.finished(TWO_ROUNDS + NOISE)
    assert row.state is RunState.FINISHED, row.reason
    [*_, record] = await records(federation, row.run_id)
    survivors = len(record.clients)
    assert survivors == CLIENTS - 2
    noise = await moved(federation, row.run_id)
    # Each client adds noise of variance (σ C)² / 3; the model changes by the mean over the
    # survivors.
    expected = 4.0 * 0.5 * np.sqrt(survivors / 3) / survivors
    assert noise.std() == pytest.approx(expected, rel=0.05)
    for client in record.clients:
        lines = charged(federation, client)
        assert [line["unit"] for line in lines] == ["client"] * 2
        assert all(3.99 < line["noise_multiplier"] < 4.0 for line in lines)
    [_, committed] = await federation.coordinator.store.call(lambda store: store.rounds(row.run_id))
    assert committed.metrics == {}, "no loss is reported"
    assert committed.privacy is not None
    assert committed.privacy.largest is not None
    assert len(committed.privacy.clients) == survivors


async def test_masked_updates_with_noise_for_records_report_no_loss(
    federation: SumFederation,
) -> None:
    """Weights are numbers of samples, which are public."""
    noise = NOISE.replace("client", "record").replace("0.5", "2.0")
    row = await federation.finished(RUN_FILE + noise)
    assert row.state is RunState.FINISHED, row.reason
    [record] = await records(federation, row.run_id)
    assert len(record.clients) == CLIENTS
    for client in record.clients:
        [line] = [each for each in charged(federation, client) if each["run"] == row.run_id]
        assert (line["unit"], line["noise_multiplier"]) == ("record", 4.0)
    [committed] = await federation.coordinator.store.call(lambda store: store.rounds(row.run_id))
    assert committed.metrics == {}, "no loss is reported"


async def test_failed_training_is_charged_and_does_not_identify_its_client(
    federation: SumFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def diverging(training: Any, instruction: rpc.Instruction, *rest: Any, **named: Any) -> Trained:
        if instruction.client_id == "client-3":
            raise TrainingError("training diverged in epoch 1")
        return train_update(training, instruction, *rest, **named)

    monkeypatch.setattr("potluck.client.training.device.train_update", diverging)
    row, said = await federation.watched(RUN_FILE + NOISE)
    assert row.state is RunState.FINISHED, row.reason
    [record] = await records(federation, row.run_id)
    assert len(record.clients) == CLIENTS
    assert not any("failed" in text or "client-3" in text for text in said)
    assert len(charged(federation, "client-3")) == 1


async def test_new_attempt_draws_new_noise_and_is_charged_again(
    federation: SumFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of seven fall silent after their upload, which is one too many."""
    with silent(monkeypatch, dict.fromkeys(federation.members.names[:3], MessageType.SURVIVORS)):
        row = await federation.coordinator.start_run(RUN_FILE + NOISE)
        await until(lambda: attempt_of(federation, row.run_id) > 1)
    row = await federation.ended(row.run_id)
    assert row.state is RunState.FINISHED, row.reason
    attempts = len(await records(federation, row.run_id))
    assert attempts > 1
    for client in federation.members.names:
        assert 1 < len(charged(federation, client)) <= attempts


def attempt_of(federation: SumFederation, run_id: str) -> int:
    driver = federation.coordinator.runs.driver(run_id)
    progress = None if driver is None else driver.progress()
    return 0 if progress is None else progress.attempt


async def test_hosts_refuse_rounds_beyond_the_epsilon_of_their_owner(
    members: Members, tmp_path: Path
) -> None:
    async with sum_federation(members, tmp_path) as federation:
        await federation.start(disclosure=DisclosurePolicy(training_epsilon=3.0))
        # The privacy loss of two rounds would be ε = 3.5, above the owner's limit.
        row, said = await federation.watched(TWO_ROUNDS + NOISE)
        assert row.state is RunState.FAILED
        assert any(BUDGET_SPENT in text for text in [*said, row.reason])
        for client in members.names:
            assert len(charged(federation, client)) == 1


async def test_adaptive_clip_is_the_same_for_all_clients(
    federation: SumFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, seen = HostGuard.hide_update, dict[int, set[float]]()

    def hide_update(self: HostGuard, instruction: rpc.Instruction) -> UpdateNoise:
        seen.setdefault(instruction.round, set()).add(instruction.train.privacy.clip)
        return honest(self, instruction)

    monkeypatch.setattr(HostGuard, "hide_update", hide_update)
    adapting = NOISE + "clip_quantile = 0.5\nclip_quantile_share = 0.5\n"
    row = await federation.finished(TWO_ROUNDS + adapting)
    assert row.state is RunState.FINISHED, row.reason
    assert seen[1] == {0.5}
    [second] = seen[2]
    # The noise of the count has a standard deviation of 0.6; the clip changes by a factor exp(-0.2
    # · count).
    assert 0.2 < second < 1.0
    assert second != 0.5
    for client in federation.members.names:
        assert len(charged(federation, client)) == 2
