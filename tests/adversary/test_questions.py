"""Questions and evaluations of a lying coordinator, with models chosen to reveal much."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adversary.conftest import CLIENTS, Scene, attacked
from adversary.proxy import Script
from support.client_host import reference
from support.sum_federation import Members

from potluck.client.disclosure.outgoing_log import Outgoing, OutgoingLog
from potluck.common.tasks.digits import Digits
from potluck.common.tensors.digest import digest_of
from potluck.common.tensors.model_arrays import state_arrays
from potluck.common.tensors.tensor_files import write_tensors
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1 import transfer_pb2
from potluck.server.store import RunState

VICTIM = "client-0"
CLASSES = 10
CERTAIN = 40.0
"""Loss of a sample whose class is not the one that the model always predicts."""
TASK = rpc.Plugin(name="digits", options_json=json.dumps({"clients": CLIENTS, "held_out": 0.2}))
ALLOWED = {"questions": ["loss", "gradient-norm"], "held_out_counts": True}
RUN = f"""
rounds = 1
clients_per_round = 2
expected_clients = {CLIENTS}
training = {{steps = 1}}
"""


class Answers(Script):
    """Keeps the answers to the test's own instructions; the real coordinator does not receive
    them."""

    def __init__(self, wanted: int) -> None:
        self.found: dict[str, rpc.Answer] = {}
        self._wanted = wanted
        self._complete = asyncio.Event()

    def from_host(self, host: str, message: rpc.AttendRequest) -> Iterable[rpc.AttendRequest]:
        answer = message.answer
        if message.acknowledgement.instruction_id.startswith("forged/"):
            return []
        if not answer.instruction_id.startswith("forged/"):
            return [message]
        self.found[answer.instruction_id] = answer
        if len(self.found) == self._wanted:
            self._complete.set()
        return []

    async def all(self) -> list[rpc.Answer]:
        """Return all answers, in the order of their ids."""
        async with asyncio.timeout(240):
            await self._complete.wait()
        return [self.found[each] for each in sorted(self.found)]


def naming(scene: Scene, number: int, folder: Path) -> transfer_pb2.ModelReference:
    """Offer a model that predicts the same class for every sample."""
    weights = {name: torch.zeros_like(each) for name, each in Digits().model().state_dict().items()}
    *_, bias = weights.values()
    bias[number] = CERTAIN
    made = Digits().model()
    made.load_state_dict(weights)
    path = folder / f"naming-{number}"
    write_tensors(path, state_arrays(made))
    content = path.read_bytes()
    scene.liar.files[digest_of(content)] = content
    return reference(digest_of(content), len(content))


def instruction(name: str, **work: rpc.Question | rpc.Evaluate) -> rpc.Instruction:
    made = rpc.Instruction(id=f"forged/{name}", client_id=VICTIM, run_id="forged", round=1, **work)  # type: ignore[arg-type]
    made.time_left.FromSeconds(60)
    return made


async def asked_for(scene: Scene, folder: Path, kind: str) -> list[rpc.Answer]:
    """Return the victim's answers to ten questions: one model is sent for each class."""
    scene.liar.script = answers = Answers(CLASSES)
    for number in range(CLASSES):
        model = naming(scene, number, folder)
        question = rpc.Question(kind=kind, names=[kind], task=TASK, model=model)
        scene.liar.tell("host-0", instruction(str(number), question=question))
    return await answers.all()


async def asked_to_evaluate(scene: Scene, folder: Path) -> rpc.Answer:
    scene.liar.script = answers = Answers(1)
    work = rpc.Evaluate(model=naming(scene, 0, folder), task=TASK)
    scene.liar.tell("host-0", instruction("evaluation", evaluate=work))
    [answer] = await answers.all()
    return answer


def sent(scene: Scene, kind: Outgoing) -> list[Mapping[str, Any]]:
    """Return the entries of this kind in the victim's log of outgoing data."""
    log = OutgoingLog(scene.federation.folder / "host-0" / "outgoing")
    return [entry for entry in log.entries(VICTIM) if entry["kind"] == kind]


def labels(*, held_out: bool = False) -> list[int]:
    """Return the victim's true label counts."""
    data = Digits(clients=CLIENTS, held_out=0.2).client_data(VICTIM, None)  # type: ignore[arg-type]
    examples = data.held_out if held_out else data.train
    assert examples is not None
    counts: list[int] = np.bincount(examples.labels.numpy(), minlength=CLASSES).tolist()
    return counts


@pytest.mark.parametrize("kind", ["loss", "gradient-norm"])
async def test_questions_that_would_reveal_a_label_histogram_are_refused_by_default(
    scene: Scene, tmp_path: Path, kind: str
) -> None:
    answers = await asked_for(scene, tmp_path, kind)
    assert {answer.failure.reason for answer in answers} == {"DISCLOSURE_REFUSED"}
    assert all(
        f"does not answer the question '{kind}'" in answer.failure.message for answer in answers
    )
    assert len(sent(scene, Outgoing.FAILURE)) == CLASSES
    assert not sent(scene, Outgoing.ANSWER)


async def test_client_that_allows_loss_questions_reveals_its_label_histogram(
    members: Members, tmp_path: Path
) -> None:
    """The attack works if an owner allows such questions, as the threat model states."""
    async with attacked(members, tmp_path, disclosure=ALLOWED) as scene:
        answers = await asked_for(scene, tmp_path, "loss")
        logged = sent(scene, Outgoing.ANSWER)
    told = sorted(each.scalars.values["loss"] for each in answers)
    assert sorted(each["numbers"]["loss"] for each in logged) == told
    assert len({each["model"] for each in logged}) == CLASSES
    shares = 1 - np.array([each.scalars.values["loss"] for each in answers]) / CERTAIN
    truth = labels()
    assert np.rint(shares * sum(truth)).tolist() == truth


async def test_client_that_allows_gradient_norms_reveals_its_label_histogram(
    members: Members, tmp_path: Path
) -> None:
    """Only the last bias has a gradient: e − s, where e is the one-hot of the predicted class c and
    s the shares of the classes. ‖e − s‖² = 1 − 2 s_c + ‖s‖², which sums to 8 + 10 ‖s‖² over all
    c."""
    async with attacked(members, tmp_path, disclosure=ALLOWED) as scene:
        answers = await asked_for(scene, tmp_path, "gradient-norm")
    squares = np.array([each.scalars.values["gradient-norm"] for each in answers]) ** 2
    shares = (1 + (squares.sum() - 8) / CLASSES - squares) / 2
    truth = labels()
    assert np.rint(shares * sum(truth)).tolist() == truth


async def test_evaluation_counts_of_held_out_samples_are_refused_by_default(
    scene: Scene, tmp_path: Path
) -> None:
    answer = await asked_to_evaluate(scene, tmp_path)
    assert answer.failure.reason == "DISCLOSURE_REFUSED"
    assert "`held_out_counts` is false" in answer.failure.message


async def test_client_that_allows_held_out_counts_reveals_its_held_out_labels(
    members: Members, tmp_path: Path
) -> None:
    async with attacked(members, tmp_path, disclosure=ALLOWED) as scene:
        answer = await asked_to_evaluate(scene, tmp_path)
        [logged] = sent(scene, Outgoing.HELD_OUT)
    assert logged["by_class"] == labels(held_out=True)
    confusion = np.array(answer.evaluation.confusion).reshape(CLASSES, CLASSES)
    assert confusion.sum(axis=1).tolist() == labels(held_out=True)


@pytest.mark.parametrize(
    ("wants", "key"),
    [
        pytest.param('selector = {name = "pow-d"}', "`questions`", id="questions"),
        pytest.param('selector = {name = "flash"}', "`questions`", id="contexts"),
        pytest.param('selector = {name = "feel"}', "`questions`", id="gradients"),
        pytest.param("held_out = 0.2", "`held_out_counts` is false", id="held-out counts"),
    ],
)
async def test_run_that_requests_more_than_clients_allow_does_not_start(
    scene: Scene, wants: str, key: str
) -> None:
    task = f'name = "digits", clients = {CLIENTS}'
    if wants.startswith("held_out"):
        run_file = RUN + f"task = {{{task}, central_test = false, {wants}}}\n"
    else:
        run_file = RUN + f"task = {{{task}}}\n{wants}\n"
    row = await scene.federation.finished(run_file)
    assert row.state is RunState.FAILED
    assert row.committed_rounds == 0
    for said in (key, "client-0", "in the [disclosure] table of the host's configuration"):
        assert said in row.reason
