"""Initial models and models by name, chosen by an operator to reveal single samples."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adversary.conftest import CLIENTS, Scene, attacked
from numpy.typing import NDArray
from support.client_host import reference
from support.sum_federation import PATIENCE_SECONDS, Members

from potluck.client.disclosure.disclosure_policy import WITHHELD
from potluck.common.disclosure import Mode, Request
from potluck.common.errors import DataError
from potluck.common.learning.triplet import TripletSettings
from potluck.common.names import ClientId
from potluck.common.settings.local_training import LocalTraining
from potluck.common.tasks.digits import Digits, images_and_digits
from potluck.common.tensors.digest import digest_of
from potluck.common.tensors.model_arrays import state_arrays
from potluck.common.tensors.tensor_files import write_tensors
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1 import transfer_pb2
from potluck.server.store import RunState
from potluck.server.store.records import MemberState

VICTIM = "client-0"
HUGE = 1e19
"""A weight whose square, times 10, exceeds the largest float32."""


def masked(count: int = CLIENTS, **changes: str) -> str:
    """Return the run file of one masked round, which starts from the model `start.safetensors`."""
    given = {"initial_model": '"start.safetensors"', "training": "{epochs = 1}"} | changes
    return "\n".join(
        [
            "secure_aggregation = true\nrounds = 1",
            f"clients_per_round = {count}\nexpected_clients = {CLIENTS}",
            f'task = {{name = "digits", clients = {CLIENTS}}}',
            "masking = {stage_seconds = 20.0}",
            "round = {deadline_seconds = 60.0, attempts = 1}",
            *(f"{name} = {value}" for name, value in given.items()),
        ]
    )


def weights() -> dict[str, NDArray[Any]]:
    torch.manual_seed(1)
    return {name: array.copy() for name, array in state_arrays(Digits().model()).items()}


# Training that diverges ---------------------------------------------------------------------------


def samples() -> NDArray[np.float32]:
    """Return all samples that a client or the coordinator can have."""
    return images_and_digits()[0].reshape(-1, 64)


def overflowing_on(record: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
    """Return a model whose logits are infinite for one record, and which trains well on all
    others."""
    others = samples()[(samples() != record).any(axis=1)]
    towards = record - others.mean(axis=0)
    below, at = float((others @ towards).max()), float(record @ towards)
    assert below < at, "a plane has this record on one side and all others on the other"
    made = weights()
    made["1.weight"][0] = HUGE * towards / (at - below)
    made["1.bias"][0] = -HUGE * (at + below) / 2 / (at - below)
    made["3.weight"][:, 0] = 10 * HUGE
    return made


def of_clients() -> dict[str, NDArray[np.float32]]:
    """Return each client's training samples, by client."""
    task = Digits(clients=CLIENTS)
    return {
        name: task.client_data(ClientId(name), None).train.inputs.numpy().reshape(-1, 64)
        for name in (f"client-{number}" for number in range(CLIENTS))
    }


def record_of(client: str) -> NDArray[np.float32]:
    """Return a record of a client that a plane separates from all other records."""
    mean = samples().mean(axis=0)
    mine = of_clients()[client]
    apart = [row for row in mine if ((samples() - row) @ (row - mean)).max() < 1e-4]
    unique = [row for row in apart if (samples() == row).all(axis=1).sum() == 1]
    found: NDArray[np.float32] = unique[0]
    return found


@dataclass(frozen=True)
class Seen:
    """The operator's view of a run."""

    state: RunState
    members: Mapping[str, tuple[MemberState, str]]
    notices: frozenset[str]


async def seen(scene: Scene, model: Mapping[str, NDArray[Any]], data: Path) -> Seen:
    write_tensors(data / "start.safetensors", dict(model))
    row, said = await scene.federation.watched(masked())
    [committed] = await scene.federation.coordinator.store.call(
        lambda store: store.rounds(row.run_id)
    )
    members = {each.client_id: (each.state, each.trouble or "") for each in committed.members}
    return Seen(row.state, members, frozenset(said))


async def test_model_that_overflows_on_one_record_does_not_reveal_its_client(
    members: Members, tmp_path: Path
) -> None:
    """This attack found the records of all six clients while failed trainings were reported."""
    data = tmp_path / "data"
    data.mkdir()
    allowed = {"masked_runs": 9}
    async with attacked(members, tmp_path, data=data, disclosure=allowed) as scene:
        found = [
            await seen(scene, overflowing_on(record_of(holder)), data)
            for holder in (VICTIM, f"client-{CLIENTS - 1}")
        ]
        failures = [m for _, m in scene.liar.said if m.answer.HasField("failure")]
    assert found[0] == found[1], "also without the record"
    assert found[0].state is RunState.FINISHED
    assert set(found[0].members.values()) == {(MemberState.INCLUDED, "")}
    counted = f"the training of 1 of {CLIENTS} clients failed"
    assert any(counted in text for text in found[0].notices), "it did overflow"
    assert not failures


# Profiles and questions that fail -----------------------------------------------------------------


def profile(task: rpc.Plugin, model: transfer_pb2.ModelReference) -> dict[str, Any]:
    settings = TripletSettings(bias_steps=2, attribute_steps=2)
    parameters = Request(mode=Mode.NOISY_TRIPLET, settings=settings).canonical()
    asked = rpc.Disclose(signal="triplet", parameters_json=parameters, task=task, model=model)
    return {"disclose": asked}


def question(kind: str) -> Callable[[rpc.Plugin, transfer_pb2.ModelReference], dict[str, Any]]:
    return lambda task, model: {
        "question": rpc.Question(kind=kind, names=[kind], task=task, model=model)
    }


@pytest.mark.parametrize(
    "work",
    [
        pytest.param(profile, id="profile"),
        pytest.param(question("loss"), id="loss"),
        pytest.param(question("gradient-norm"), id="gradient-norm"),
    ],
)
async def test_reason_of_a_failed_profile_or_answer_does_not_depend_on_data(
    members: Members, tmp_path: Path, work: Callable[..., dict[str, Any]]
) -> None:
    """Each model fails on another record of the client, and at another step of the computation."""
    options = json.dumps({"clients": CLIENTS})
    allowed = {"questions": ["loss", "gradient-norm"]}
    nowhere_finite = {name: np.full_like(each, HUGE) for name, each in weights().items()}
    made = [overflowing_on(record_of(VICTIM)), nowhere_finite]
    async with attacked(members, tmp_path, disclosure=allowed) as scene:
        answers = []
        for number, model in enumerate(made):
            task = rpc.Plugin(name="digits", options_json=options)
            content = offered(scene, tmp_path / f"model-{number}", model)
            asked = rpc.Instruction(
                id=f"forged/{number}",
                client_id=VICTIM,
                run_id="forged",
                round=1,
                **work(task, content),
            )
            asked.time_left.FromSeconds(60)
            scene.liar.tell("host-0", asked)
            answers.append(await answer_to(scene, asked.id))
        failures = [answer.failure for answer in answers]
    assert [each.reason for each in failures] == [DataError.reason] * 2
    assert [each.message for each in failures] == [WITHHELD] * 2


# Models one ulp apart -----------------------------------------------------------------------------


@pytest.mark.parametrize("runs", [1, 2])
async def test_models_one_ulp_apart_are_summed_over_two_sets_only_if_the_owner_allows_two_runs(
    members: Members, tmp_path: Path, runs: int
) -> None:
    """The difference of the two sums is the update of the client that is in one of them."""
    data = tmp_path / "data"
    data.mkdir()
    model = weights()
    write_tensors(data / "start.safetensors", model)
    model["3.bias"][0] = np.nextafter(model["3.bias"][0], np.float32(1))
    write_tensors(data / "beside.safetensors", model)
    allowed = {"masked_runs": runs}
    async with attacked(members, tmp_path, data=data, disclosure=allowed) as scene:
        first = await scene.federation.finished(masked())
        beside = masked(CLIENTS - 1, initial_model='"beside.safetensors"')
        second = await scene.federation.finished(beside)
    assert first.state is RunState.FINISHED, first.reason
    if runs == 1:
        assert second.state is RunState.FAILED
        assert "are in masked rounds of 1 other run" in second.reason
    else:
        assert second.state is RunState.FINISHED, "the owner gave that up"


# Models by name -----------------------------------------------------------------------------------


async def test_model_of_a_library_that_downloads_weights_is_refused(
    scene: Scene, tmp_path: Path
) -> None:
    """Otherwise, the host would unpickle a file because a coordinator asked for it."""
    name = "torchvision.models:resnet18"
    task = rpc.Plugin(
        name="digits",
        options_json=json.dumps({"clients": CLIENTS}),
        model_json=json.dumps({"name": name, "weights": "DEFAULT"}),
    )
    model = offered(scene, tmp_path / "model", weights())
    work = rpc.Train(model=model, task=task, training_json=LocalTraining(steps=1).as_json())
    forged = rpc.Instruction(id="forged/1", client_id=VICTIM, run_id="forged", round=1, train=work)
    forged.time_left.FromSeconds(60)
    scene.liar.tell("host-0", forged)
    answer = await answer_to(scene, "forged/1")
    assert "`model_modules` of this machine's configuration does not list" in answer.failure.message


# Forged instructions ------------------------------------------------------------------------------


def offered(
    scene: Scene, path: Path, model: Mapping[str, NDArray[Any]]
) -> transfer_pb2.ModelReference:
    """Write a model that the test has made, and offer it to hosts for download."""
    write_tensors(path, dict(model))
    content = path.read_bytes()
    scene.liar.files[digest_of(content)] = content
    return reference(digest_of(content), len(content))


async def answer_to(scene: Scene, instruction_id: str) -> rpc.Answer:
    """Wait for a host's answer to an instruction."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            for _, message in scene.liar.said:
                if message.answer.instruction_id == instruction_id:
                    return message.answer
            await asyncio.sleep(0.02)
