"""Different instructions to the clients of one masked round.

Before a sum was bound to the training of all its clients, a coordinator could instruct all clients
except one to train without any effect. The sum over all of them was then that client's update.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
from adversary.conftest import CLIENTS, Scene
from adversary.proxy import Script

from potluck.common.updates.training_agreement import training_sha256
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1 import secure_aggregation_pb2 as wire
from potluck.secagg.protocol import Envelope, MessageType, decode, encode
from potluck.secagg.protocol.wire.messages import Header, Invitation
from potluck.server.store import RunState

MASKED = f"""
secure_aggregation = true
rounds = 1
clients_per_round = {CLIENTS}
expected_clients = {CLIENTS}
task = {{name = "digits", clients = {CLIENTS}}}
training = {{steps = 5}}
masking = {{stage_seconds = 20.0}}
round = {{deadline_seconds = 60.0, attempts = 1}}
"""
VICTIM = "host-0"
ANOTHER_SUM = "names another training than the one that this client received"
ALIKE = "all clients of a masked round must train alike"
Edit = Callable[[rpc.Train], None]


class OthersTold(Script):
    """Sends other training instructions to all hosts except the victim's."""

    def __init__(self, edit: Edit, *, headers: bool = False) -> None:
        """headers: True if their invitations are bound to the changed instructions."""
        self._edit = edit
        self._headers = headers
        self._digests: dict[str, bytes] = {}

    def to_host(self, host: str, message: rpc.AttendResponse) -> Iterable[rpc.AttendResponse]:
        instruction = message.instruction
        if host == VICTIM:
            return [message]
        if instruction.WhichOneof("work") == "train":
            self._edit(instruction.train)
            if self._headers:
                self._digests[host] = training_sha256(instruction.train)
        elif self._headers and instruction.WhichOneof("work") == "secure":
            _bind(instruction.secure, self._digests.get(host, bytes(32)))
        return [message]


def _bind(step: rpc.SecureStep, digest: bytes) -> None:
    envelope = decode(Envelope, step.envelope.SerializeToString(deterministic=True))
    if envelope.type is not MessageType.INVITATION:
        return
    invitation = decode(Invitation, envelope.payload)
    header = replace(decode(Header, invitation.header), training_sha256=digest)
    forged = replace(envelope, payload=encode(replace(invitation, header=encode(header))))
    step.envelope.CopyFrom(wire.SecureEnvelope.FromString(encode(forged)))


def settings(**changes: Any) -> Edit:
    def edit(work: rpc.Train) -> None:
        work.training_json = json.dumps(json.loads(work.training_json) | changes)

    return edit


def still(work: rpc.Train) -> None:
    """Set a learning rate of almost 0, and the same weight for all clients."""
    settings(learning_rate=1e-30)(work)
    work.weighting = rpc.WEIGHTING_EQUAL


def left_open(work: rpc.Train) -> None:
    given = json.loads(work.training_json)
    del given["learning_rate"]
    work.training_json = json.dumps(given)


def attribute(name: str, value: Any) -> Edit:
    def edit(work: rpc.Train) -> None:
        if isinstance(value, list):
            getattr(work, name)[:] = value
        else:
            setattr(work, name, value)

    return edit


def merged(**fields: Any) -> Edit:
    return lambda work: work.MergeFrom(rpc.Train(**fields))


def options(name: str, **changes: Any) -> Edit:
    def edit(work: rpc.Train) -> None:
        plugin = getattr(work, name)
        plugin.options_json = json.dumps(json.loads(plugin.options_json) | changes)

    return edit


def another_objective(work: rpc.Train) -> None:
    work.objective.name, work.objective.options_json = "fedprox", '{"mu": 0.5}'


def without_noise(work: rpc.Train) -> None:
    work.ClearField("privacy")


async def refused(scene: Scene, script: Script, run_file: str = MASKED) -> list[str]:
    """Return the failures that hosts reported; check that no sum was released."""
    scene.liar.script = script
    row = await scene.federation.finished(run_file)
    assert row.state is RunState.FAILED
    assert not any(map(scene.federation.has_released, scene.federation.members.names))
    return [row.reason, *(message.answer.failure.message for _, message in scene.liar.said)]


async def test_honest_masked_round_succeeds_through_the_attack_proxy(scene: Scene) -> None:
    row = await scene.federation.finished(MASKED)
    assert row.state is RunState.FINISHED, row.reason


def spaced(work: rpc.Train) -> None:
    work.training_json = work.training_json.replace(",", " ,\n")


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(spaced, id="a text that means the same"),
        # Clients of a masked round are trained one by one, whatever companions they have.
        pytest.param(merged(companions=["client-1", "client-2"]), id="companions"),
    ],
)
async def test_changed_instruction_field_that_no_update_depends_on_is_harmless(
    scene: Scene, edit: Edit
) -> None:
    scene.liar.script = OthersTold(edit)
    row = await scene.federation.finished(MASKED)
    assert row.state is RunState.FINISHED, row.reason


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        pytest.param(still, ANOTHER_SUM, id="others stand still"),
        pytest.param(settings(steps=1), ANOTHER_SUM, id="others take one step"),
        pytest.param(attribute("weighting", rpc.WEIGHTING_EQUAL), ANOTHER_SUM, id="weighting"),
        pytest.param(another_objective, ANOTHER_SUM, id="objective"),
        pytest.param(options("task", clients=1000), ANOTHER_SUM, id="others have few samples"),
        pytest.param(left_open, "`learning_rate` is missing", id="settings left to the client"),
        pytest.param(attribute("quotas", [0.0] * 10), ALIKE, id="quotas"),
        pytest.param(attribute("dropped", ["0.weight"]), ALIKE, id="dropped"),
        pytest.param(attribute("seed", 7), ALIKE, id="seed"),
        pytest.param(attribute("pace", 1.0), ALIKE, id="pace"),
        pytest.param(attribute("reports", ["root_mean_square"]), ALIKE, id="reports"),
        pytest.param(attribute("part", 1), ANOTHER_SUM, id="part"),
        pytest.param(attribute("one_way", ["0.weight"]), ANOTHER_SUM, id="one way"),
        pytest.param(merged(kept={"purposes": ["correction"]}), ALIKE, id="control variates"),
        pytest.param(merged(kept={"purposes": ["model"]}), ALIKE, id="kept tensors"),
        pytest.param(
            merged(kept={"purposes": ["model"], "included_update_id": "run/1/1/client-1"}),
            ALIKE,
            id="kept.included_update_id",
        ),
        pytest.param(merged(personal={"pull": 0.5}), ANOTHER_SUM, id="personal model"),
        pytest.param(merged(summing={"quantum_bits": 9}), ANOTHER_SUM, id="fixed point"),
        pytest.param(merged(auxiliary={"names": ["c"]}), "lacks the file", id="auxiliaries"),
        pytest.param(merged(before_upload={"kind": "loss"}), "'loss'", id="question"),
    ],
)
async def test_different_instructions_for_all_clients_except_one_give_no_sum(
    scene: Scene, edit: Edit, why: str
) -> None:
    assert any(why in text for text in await refused(scene, OthersTold(edit)))


async def test_clients_with_different_training_digests_form_no_sum(scene: Scene) -> None:
    await refused(scene, OthersTold(still, headers=True))


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        pytest.param(
            without_noise, "vectors have other names or lengths", id="others add no noise"
        ),
        pytest.param(
            merged(privacy={"noise_multiplier": 3.9}), ANOTHER_SUM, id="others add less noise"
        ),
        pytest.param(merged(privacy={"clip": 1e-3}), ANOTHER_SUM, id="others send next to nothing"),
        pytest.param(
            merged(privacy={"trainings": 2}), ANOTHER_SUM, id="another number of trainings"
        ),
    ],
)
async def test_different_noise_for_all_clients_except_one_gives_no_sum_and_no_charge(
    scene: Scene, edit: Edit, why: str
) -> None:
    private = f'{MASKED}\n[privacy]\nunit = "client"\nnoise_multiplier = 4.0\n'
    assert any(why in text for text in await refused(scene, OthersTold(edit), private))
    assert not list(scene.federation.folder.glob("host-*/privacy/*.jsonl"))
