"""Masked updates over real gRPC: real client agents, each on a host of its own."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from numpy.typing import NDArray
from support.federation import until
from support.sum_federation import Members, SumFederation, silent, sum_federation

from potluck.client.disclosure.disclosure_policy import DisclosurePolicy
from potluck.client.disclosure.report import Records
from potluck.client.training.local_update import Trained, train_update
from potluck.client.training.unmasked_update import Differences
from potluck.common.errors import ConfigurationError, TrainingError
from potluck.common.tensors.layout import Layout
from potluck.common.tensors.tensor_files import FileDigest, write_tensors
from potluck.deploy.commands.disclosure_audit_command import audit
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.secagg.host.masked_updates import write_masked
from potluck.secagg.host.sum_sessions import SumSessions
from potluck.secagg.protocol import Envelope, MessageType, SessionRecord, decode, encode
from potluck.server.store import RunState
from potluck.server.store.records import MemberState

pytestmark = pytest.mark.asyncio(loop_scope="module")

CLIENTS = 7
RUN_FILE = f"""
rounds = 2
clients_per_round = {CLIENTS}
expected_clients = {CLIENTS}
task = {{name = "digits", clients = {CLIENTS}}}
training = {{epochs = 1}}
"""
MASKED = "secure_aggregation = true\n"
UNEVALUATED = "evaluation = {every = 0}\n"
ONE_ROUND = MASKED + RUN_FILE.replace("rounds = 2", "rounds = 1")
IMPATIENT = """
masking.stage_seconds = 20.0
[round]
deadline_seconds = 8.0
leavers = "drop"
"""


@pytest_asyncio.fixture(loop_scope="module")
async def federation(members: Members, tmp_path: Path) -> AsyncIterator[SumFederation]:
    async with sum_federation(members, tmp_path) as federation:
        await federation.start()
        yield federation


async def weights(federation: SumFederation, run_id: str) -> dict[str, NDArray[Any]]:
    """Return the last model of a run."""
    _, _, blake3, _ = await federation.coordinator.archive.model_of(run_id, 0)
    with federation.coordinator.files.opened(blake3) as file:
        return {name: array.copy() for name, array in file.arrays.items()}


async def measures(federation: SumFederation, run_id: str) -> list[Mapping[str, float]]:
    """Return the metrics of each round of a run."""
    rounds = await federation.coordinator.store.call(lambda store: store.rounds(run_id))
    return [row.metrics for row in rounds]


async def test_masked_run_gives_the_model_of_the_open_run_within_the_bound(
    federation: SumFederation,
) -> None:
    masked = await federation.finished(MASKED + UNEVALUATED + RUN_FILE)
    assert masked.state is RunState.FINISHED, masked.reason
    opened = await federation.finished(UNEVALUATED + RUN_FILE)
    one, other = await weights(federation, masked.run_id), await weights(federation, opened.run_id)
    for name, array in one.items():
        assert np.abs(array - other[name]).max() < 1e-6, name
    losses = await measures(federation, masked.run_id), await measures(federation, opened.run_id)
    for of_sum, of_updates in zip(*losses, strict=True):
        assert of_sum.keys() == of_updates.keys() == {"training_loss"}
        assert of_sum["training_loss"] == pytest.approx(of_updates["training_loss"], rel=1e-3)
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
    ],
)
async def test_averaging_strategies_give_the_same_model_with_and_without_masks(
    federation: SumFederation, strategy: str
) -> None:
    """Clients differ in size and steps, and there is a proximal term."""
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


async def test_hics_fl_selects_the_same_with_and_without_masks(
    federation: SumFederation,
) -> None:
    """The selector reads no update, so masks do not change its choice."""
    run_file = f'{RUN_FILE}selector = {{name = "hics-fl", entropies = "told"}}\n'
    masked = await federation.finished(MASKED + run_file)
    assert masked.state is RunState.FINISHED, masked.reason
    opened = await federation.finished(run_file)
    one, other = await weights(federation, masked.run_id), await weights(federation, opened.run_id)
    for name, array in one.items():
        assert np.abs(array - other[name]).max() < 1e-6, name


async def sums_of(federation: SumFederation, run_id: str) -> list[SessionRecord]:
    """Return the session records of a run's sums, in order."""
    stored = await federation.stored()
    return [SessionRecord.model_validate(s.record) for s in stored if s.run_id == run_id]


@pytest.mark.parametrize(
    ("stage", "counted"),
    [
        (MessageType.INVITATION, False),
        (MessageType.ROSTER, False),
        (MessageType.DELIVERY, False),
        (MessageType.SURVIVORS, True),
        (MessageType.CERTIFICATE, True),
    ],
)
async def test_clients_silent_before_their_upload_are_excluded_and_after_it_counted(
    federation: SumFederation, stage: MessageType, counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet = ["client-1", "client-4"]
    with silent(monkeypatch, dict.fromkeys(quiet, stage)):
        row = await federation.finished(ONE_ROUND + IMPATIENT)
    assert row.state is RunState.FINISHED, row.reason
    names = [name for name in federation.members.names if counted or name not in quiet]
    [record] = await sums_of(federation, row.run_id)
    assert record.outcome == "released"
    assert sorted(record.clients) == names
    [committed] = await federation.coordinator.store.call(lambda store: store.rounds(row.run_id))
    included = [m.client_id for m in committed.members if m.state is MemberState.INCLUDED]
    assert sorted(included) == names
    for member in committed.members:
        assert member.update is None or (member.update.samples, member.update.loss) == (0, None)


@pytest.mark.parametrize("stage", [MessageType.ROSTER, MessageType.DELIVERY, MessageType.SURVIVORS])
async def test_round_with_too_few_survivors_is_retried_with_new_keys(
    federation: SumFederation, stage: MessageType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At first three of seven clients are lost, one too many. No client receives a cancellation."""
    sessions: dict[str, set[str]] = {}
    with silent(monkeypatch, dict.fromkeys(federation.members.names[:3], stage)):
        row = await federation.coordinator.start_run(ONE_ROUND + IMPATIENT)
        await until(lambda: attempt_of(federation, row.run_id) > 1)
    row = await federation.ended(row.run_id)
    assert row.state is RunState.FINISHED, row.reason
    records = await sums_of(federation, row.run_id)
    assert records[-1].outcome == "released"
    assert records[-1].attempt > 1
    assert len({record.session_id for record in records}) == len(records)
    for name in federation.members.names:
        ledger = federation.ledger(name).of(name)
        sessions[name] = {each.session_id for each in ledger.releases}
        assert sessions[name] <= {records[-1].session_id}


def attempt_of(federation: SumFederation, run_id: str) -> int:
    driver = federation.coordinator.runs.driver(run_id)
    progress = None if driver is None else driver.progress()
    return 0 if progress is None else progress.attempt


@pytest.mark.parametrize(
    ("disclosure", "why"),
    [
        (
            {"sum_hosts": 8},
            "policy: the sum needs only 5 hosts, but the data owner requires at least 8",
        ),
        (
            {"sum_colluding_hosts": 3},
            "policy: the session assumes that 2 hosts collude, but this client",
        ),
    ],
)
async def test_clients_refuse_masked_rounds_weaker_than_their_policy(
    members: Members, tmp_path: Path, disclosure: dict[str, Any], why: str
) -> None:
    async with sum_federation(members, tmp_path) as federation:
        await federation.start(disclosure=DisclosurePolicy(**disclosure))
        row = await federation.finished(ONE_ROUND + IMPATIENT)
        assert row.state is RunState.FAILED
        assert why in row.reason
        for name in members.names:
            assert federation.ledger(name).of(name).uploads == []


async def test_clients_with_stricter_policies_join_a_run_that_meets_them(
    members: Members, tmp_path: Path
) -> None:
    async with sum_federation(members, tmp_path) as federation:
        policy = DisclosurePolicy(sum_hosts=6, sum_colluding_hosts=1, updates="masked", sums=())
        await federation.start(disclosure=policy)
        row = await federation.finished(ONE_ROUND + "masking.hosts = 6\n")
        assert row.state is RunState.FINISHED, row.reason
        opened = await federation.finished(RUN_FILE + IMPATIENT.replace("masking", "[masking]\n#"))
        assert opened.state is RunState.FAILED
        assert "sends masked updates only" in opened.reason


@pytest.mark.parametrize("failing", ["update", "training"])
async def test_failed_training_in_a_masked_round_does_not_identify_its_client(
    federation: SumFederation, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """The coordinator receives the same messages from this client as from the others."""

    def spoiled(path: Path, update: Differences, *rest: Any) -> FileDigest:
        if "host-3" in path.parts:
            update.body[5] = np.nan
        return write_masked(path, update, *rest)

    def diverging(training: Any, instruction: rpc.Instruction, *rest: Any, **named: Any) -> Trained:
        if instruction.client_id == "client-3":
            raise TrainingError("training diverged in epoch 1")
        return train_update(training, instruction, *rest, **named)

    if failing == "update":
        monkeypatch.setattr("potluck.secagg.host.sum_sessions.write_masked", spoiled)
    else:
        monkeypatch.setattr("potluck.client.training.device.train_update", diverging)
    row, said = await federation.watched(ONE_ROUND)
    assert row.state is RunState.FINISHED, row.reason
    [record] = await sums_of(federation, row.run_id)
    assert (record.refusals, sorted(record.clients)) == ({}, federation.members.names)
    [committed] = await federation.coordinator.store.call(lambda store: store.rounds(row.run_id))
    assert {m.state for m in committed.members} == {MemberState.INCLUDED}
    assert not any(m.trouble for m in committed.members)
    failed = f"the training of 1 of {len(record.clients)} clients failed"
    assert any(failed in text for text in said)
    assert not any("client-3" in text for text in said)


async def test_unsigned_or_malformed_masked_uploads_are_refused_and_the_round_continues(
    federation: SumFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One client signs for another file; another client's file has another form."""
    honest = SumSessions.mask

    async def mask(self: SumSessions, instruction: rpc.Instruction, *rest: Any) -> Any:
        file, word = await honest(self, instruction, *rest)
        if instruction.client_id == "client-3":
            signed = decode(Envelope, bytes.fromhex(word))
            word = encode(replace(signed, signature=bytes(64))).hex()
        return file, word

    def other_vectors(path: Path, update: Differences, *rest: Any) -> FileDigest:
        if "host-4" in path.parts:
            return write_tensors(
                path, {"body": update.body}, layout=Layout.of({"body": update.body})
            )
        return write_masked(path, update, *rest)

    monkeypatch.setattr(SumSessions, "mask", mask)
    monkeypatch.setattr("potluck.secagg.host.sum_sessions.write_masked", other_vectors)
    row = await federation.finished(ONE_ROUND)
    assert row.state is RunState.FINISHED, row.reason
    [committed] = await federation.coordinator.store.call(lambda store: store.rounds(row.run_id))
    troubles = {m.client_id: m.trouble or "" for m in committed.members if m.trouble}
    assert sorted(troubles) == ["client-3", "client-4"]
    assert "did not confirm its update with a valid signature: signature" in troubles["client-3"]
    assert "masked update refused" in troubles["client-4"]


async def test_clipped_parameter_changes_are_counted_in_a_warning(
    federation: SumFederation,
) -> None:
    row, said = await federation.watched(ONE_ROUND + "masking.clip = 1e-4\n")
    assert row.state is RunState.FINISHED
    assert any("parameter changes were clipped to ±0.0001" in text for text in said)


async def test_masked_run_without_a_federation_root_is_refused(
    members: Members, tmp_path: Path
) -> None:
    async with sum_federation(members, tmp_path, rooted=False) as federation:
        with pytest.raises(ConfigurationError, match="secure_aggregation needs a federation root"):
            await federation.coordinator.start_run(ONE_ROUND)


async def test_masked_run_on_too_few_hosts_is_refused(members: Members, tmp_path: Path) -> None:
    more_hosts = ONE_ROUND.replace(f"= {CLIENTS}", f"= {CLIENTS + 1}")
    why = f"on {CLIENTS + 1} hosts, and the federation's {CLIENTS} members are on {CLIENTS}; add"
    async with sum_federation(members, tmp_path) as federation:
        with pytest.raises(ConfigurationError, match=why):
            await federation.coordinator.start_run(more_hosts + f"masking.hosts = {CLIENTS + 1}\n")
        assert await federation.coordinator.store.call(lambda store: store.runs()) == []


def has_released_twice(federation: SumFederation, client: str) -> bool:
    return len(federation.ledger(client).of(client).releases) == 2


async def test_owners_and_operators_can_list_the_masked_rounds_of_a_client(
    federation: SumFederation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = await federation.finished(MASKED + RUN_FILE)
    for name in federation.members.names:
        await until(partial(has_released_twice, federation, name))
    async with federation.operator() as operator:
        capsys.readouterr()
        await audit(operator, row.run_id, as_json=True)
        sums = json.loads(capsys.readouterr().out)["sums"]
        await audit(operator, row.run_id)
        shown = " ".join(capsys.readouterr().out.split())
    assert [each["round"] for each in sums] == [1, 2]
    assert {each["disclosure"] for each in sums} == {"update"}
    assert "model updates of digits, round 2" in shown
    [client] = json.loads(Records(tmp_path / "host-3", DisclosurePolicy()).values())["clients"]
    assert [each["purpose"] for each in client["sums"]] == ["update", "update"]
    lines = list(Records(tmp_path / "host-3", DisclosurePolicy()).lines())
    assert any(
        "model updates of digits, masked, in 2 sums with at least 6 other clients, at least 7 "
        f"hosts in all, for rounds 1 to 2 of run {row.run_id}" in line
        for line in lines
    ), lines


async def test_selector_that_limits_samples_per_client_is_refused_with_masks(
    federation: SumFederation,
) -> None:
    selector = 'selector = {name = "kl", truncate = true}\n'
    with pytest.raises(ConfigurationError, match="kl limits the samples that each client"):
        await federation.finished(MASKED + selector + RUN_FILE)
