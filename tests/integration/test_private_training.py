"""Trainings with noise in real processes: the ledger, the owner's limit, kills, and runs."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from support.client_host import host_config, reference, train_instruction, write_config
from support.fake_coordinator import FakeCoordinator, serving
from support.federation import plugins_installed, set_values
from support.host_scene import Scene
from support.pki import TestFederation
from support.profile_federation import profile_federation
from support.programs import run_program
from support.shared_forks import shared_forks

from potluck.client.disclosure.disclosure_policy import DisclosurePolicy
from potluck.common.disclosure import Mode, Request
from potluck.common.records.privacy_loss import BUDGET_SPENT, NO_ANSWER
from potluck.common.tensors.model_arrays import state_arrays
from potluck.common.tensors.tensor_files import write_tensors
from potluck.deploy.local.local_federation import kill, start_program
from potluck.deploy.local.processes import LocalProcess
from potluck.privacy.host.host_guard import spent_in_epoch
from potluck.privacy.host.privacy_ledger import PrivacyLedger
from potluck.rpc.v1 import coordinator_pb2 as rpc


@pytest.fixture
async def scene(tmp_path: Path, federation: TestFederation) -> AsyncIterator[Scene]:
    scene = Scene(tmp_path, federation)
    async with serving(scene.fake, federation.coordinator) as port:
        scene.port = port
        yield scene


def private(name: str, model: Any, **values: Any) -> rpc.Instruction:
    """Return an instruction to train with noise: 2 steps of about 16 samples."""
    instruction = train_instruction(name, model, training={"steps": 2, "batch_size": 16}, **values)
    instruction.train.privacy.CopyFrom(
        rpc.Privacy(unit="record", noise_multiplier=4.0, delta=1e-5, clip=1.0, trainings=9)
    )
    return instruction


def ledger(state: Path, client: str = "client-0") -> list[dict[str, Any]]:
    path = state / "privacy" / f"{client}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines[1:]]


async def test_noisy_update_is_charged_before_its_upload_and_has_no_loss(
    scene: Scene,
) -> None:
    model = scene.model()
    async with scene.host():
        scene.fake.instruct(private("a", model))
        upload = await scene.fake.completed("a")
        assert len(ledger(scene.folder / "state")) == 1
        scene.fake.instruct(private("b", model))
        other = await scene.fake.completed("b")
    report = upload.header.report
    assert report.samples > 0
    assert report.steps == 2
    assert report.loss == 0
    assert upload.content != other.content, "the same seed does not give the same noise"
    assert len(ledger(scene.folder / "state")) == 2


async def test_repeated_instruction_sends_the_stored_update_without_a_charge(
    scene: Scene,
) -> None:
    model = scene.model()
    async with scene.host():
        scene.fake.instruct(private("a", model))
        first = await scene.fake.completed("a")
    async with scene.host():  # another process
        scene.fake.uploads.clear()
        scene.fake.instruct(private("a", model))
        again = await scene.fake.completed("a")
    assert again.content == first.content
    assert len(ledger(scene.folder / "state")) == 1


async def test_host_at_its_limit_refuses_training_with_a_fixed_message(scene: Scene) -> None:
    model = scene.model()
    async with scene.host(disclosure={"training_epsilon": 0.5}):
        scene.fake.instruct(private("a", model))
        answer = await scene.fake.answered("a")
    assert answer.failure.reason == "DISCLOSURE_REFUSED"
    assert answer.failure.message == f"client 'client-0': {BUDGET_SPENT}"
    assert ledger(scene.folder / "state") == []


async def test_an_owner_may_refuse_updates_without_noise(scene: Scene) -> None:
    model = scene.model()
    async with scene.host(disclosure={"updates": "private"}):
        scene.fake.instruct(train_instruction("a", model))
        answer = await scene.fake.answered("a")
        scene.fake.instruct(private("b", model))
        await scene.fake.completed("b")
    assert answer.failure.reason == "DISCLOSURE_REFUSED"
    assert "add [privacy] to the run file" in answer.failure.message


async def test_check_refuses_private_training_with_exact_reports(scene: Scene) -> None:
    work = private("a", scene.model()).train
    work.reports.append("root_mean_square")
    check = rpc.Instruction(id="c", client_id="client-0", run_id="run", check=rpc.Check(train=work))
    check.time_left.FromSeconds(60)
    async with scene.host():
        scene.fake.instruct(check)
        answer = await scene.fake.answered("c")
    assert "numbers reported" in answer.failure.message


def asked_loss(name: str, model: Any) -> rpc.Instruction:
    """Return an instruction to answer a question about the loss, with noise."""
    found = private(name, model)
    question = rpc.Question(kind="loss", names=["loss"], task=found.train.task, model=model)
    question.privacy.CopyFrom(found.train.privacy)
    question.privacy.answers = 9
    question.privacy.answer_noise_multiplier = 8.0
    question.privacy.answer_clip = 4.0
    found.question.CopyFrom(question)  # replaces the training
    return found


async def test_noisy_answer_is_charged_once_and_repeated_after_a_restart(
    scene: Scene,
) -> None:
    model = scene.model()
    async with scene.host():
        scene.fake.instruct(asked_loss("a", model))
        first = await scene.fake.answered("a")
    async with scene.host():  # another process
        scene.fake.instruct(asked_loss("b", model))
        again = await scene.fake.answered("b")
    loss = first.scalars.values["loss"]
    assert 0 <= loss <= 4  # with the noise, the mean may be outside, and is then clipped
    assert again.scalars.values["loss"] == loss
    [line] = ledger(scene.folder / "state")
    assert (line["kind"], line["numbers"]) == ("answer", {"loss": loss})


async def test_host_at_its_limit_refuses_an_answer_with_a_fixed_message(scene: Scene) -> None:
    model = scene.model()
    async with scene.host(disclosure={"training_epsilon": 0.1, "questions": ["loss"]}):
        scene.fake.instruct(asked_loss("a", model))
        answer = await scene.fake.answered("a")
    assert answer.failure.message == f"client 'client-0': {NO_ANSWER}"
    assert ledger(scene.folder / "state") == []


async def test_an_owner_may_refuse_answers_without_noise(scene: Scene) -> None:
    model = scene.model()
    plain = asked_loss("a", model)
    plain.question.ClearField("privacy")
    async with scene.host(disclosure={"updates": "private", "questions": ["loss"]}):
        scene.fake.instruct(plain)
        answer = await scene.fake.answered("a")
        scene.fake.instruct(asked_loss("b", model))
        noisy = await scene.fake.answered("b")
    assert "answers 'loss' with noise only" in answer.failure.message
    assert noisy.HasField("scalars")


def asked_profile(name: str, model: Any, epsilon: float) -> rpc.Instruction:
    found = private(name, model)
    request = Request(mode=Mode.NOISY, epsilon=epsilon).canonical()
    asked = rpc.Disclose(signal="label_counts", parameters_json=request, task=found.train.task)
    found.disclose.CopyFrom(asked)  # replaces the training
    return found


async def test_profiles_and_trainings_share_the_total_limit_over_restarts(scene: Scene) -> None:
    model, limit = scene.model(), {"total_epsilon": 1.0}
    async with scene.host(disclosure=limit):
        scene.fake.instruct(asked_profile("half", model, 0.5))
        assert (await scene.fake.answered("half")).HasField("profile")
    async with scene.host(disclosure=limit):  # another process
        scene.fake.instruct(private("training", model))
        training = await scene.fake.answered("training")
        scene.fake.instruct(asked_profile("more", model, 0.6))
        profile = await scene.fake.answered("more")
        assert ledger(scene.folder / "state") == []
    assert training.failure.message == f"client 'client-0': {BUDGET_SPENT}"
    assert "its ε would exceed the remaining `total_epsilon`" in profile.failure.message
    async with scene.host(disclosure={"total_epsilon": 1.5}):
        scene.fake.instruct(private("again", model))
        await scene.fake.completed("again")
        assert len(ledger(scene.folder / "state")) == 1
    async with scene.host(disclosure={"total_epsilon": 1.5}):  # a ledger of trainings now exists
        scene.fake.instruct(asked_profile("whole", model, 1.0))
        profile = await scene.fake.answered("whole")
        scene.fake.instruct(asked_profile("half-again", model, 0.5))
        assert (await scene.fake.answered("half-again")).HasField("profile"), "the kept one"
    assert "its ε would exceed the remaining `total_epsilon`" in profile.failure.message


def watched(name: str, model: Any, round_: int) -> rpc.Instruction:
    """Return an instruction like `private`, for the task of the crash plug-ins."""
    return private(name, model, round_=round_, task="crash", options={"layered": True})


def watched_model(scene: Scene) -> Any:
    from potluck_crash import Task

    path = scene.folder / "watched-model"
    write_tensors(path, state_arrays(Task(layered=True).model()))
    content = path.read_bytes()
    return reference(scene.fake.offer(content), len(content))


# Kills -------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def process(
    folder: Path, federation: TestFederation, fake: FakeCoordinator, port: int
) -> AsyncIterator[LocalProcess]:
    """Run a client process that reaches points; kill it at the end."""
    folder.mkdir(exist_ok=True)  # noqa: ASYNC240  # nothing else runs
    config = host_config(
        folder, federation.hosts["host-0"], port, state_directory=folder / "host-0"
    )
    arguments = ["--config", str(write_config(config, folder / "host.toml"))]
    log, forks = folder / "log", shared_forks()
    found = await start_program("host-0", "potluck-client", arguments, log=log, forks=forks)
    try:
        await fake.until(lambda: fake.hosts == 1)
        yield found
    finally:
        await kill(found)
        await fake.until(lambda: fake.hosts == 0)


BOUNDARIES = [
    ("client-1", "before-rename-privacy.jsonl-1", 1),  # a client's first training: a new ledger
    ("client-0", "after-rename-privacy.jsonl-1", 2),
    ("client-0", "before-sync-privacy.jsonl-1", 2),  # later trainings add a line
    ("client-0", "train-client-0", 2),  # charged on disk, before any batch or noise is drawn
    ("client-0", "before-rename-updates.safetensors-1", 2),  # trained, update not yet on disk
    ("client-0", "after-rename-updates.safetensors-1", 2),  # update on disk, without its record
    ("client-0", "upload", 1),  # update and record are on disk
]
"""For each training: its client, the point at which its host is killed, and its number of
charges."""


async def test_host_killed_at_any_durable_write_never_records_less_than_it_spent(
    tmp_path: Path, federation: TestFederation
) -> None:
    folder, state = tmp_path / "host", tmp_path / "host" / "host-0"
    scene = Scene(tmp_path, federation)
    async with contextlib.AsyncExitStack() as stack:
        points = stack.enter_context(plugins_installed(tmp_path / "points", "potluck-client"))
        port = await stack.enter_async_context(serving(scene.fake, federation.coordinator))
        model = watched_model(scene)
        host = await stack.enter_async_context(process(folder, federation, scene.fake, port))
        for round_, (client, point, charges) in enumerate(BOUNDARIES, start=1):
            points.clear()
            points.note_boundaries()
            points.kill(point)
            asked = watched(point, model, round_)
            asked.client_id = client
            await kill_in(host, scene.fake, asked)
            host = await stack.enter_async_context(process(folder, federation, scene.fake, port))
            scene.fake.instruct(asked)
            await scene.fake.completed(point)
            assert point == "upload" or not points.spare(point)
            sent = {each.blake3 for each in scene.fake.headers if each.update_id == point}
            assert len(sent) == 1, f"{point}: an update that was kept is sent, and no other"
            charged = [line for line in ledger(state, client) if line["round"] == round_]
            assert len(charged) == charges, point
    await check_limit(tmp_path, federation, state)


async def kill_in(host: LocalProcess, fake: FakeCoordinator, asked: rpc.Instruction) -> None:
    """Send an instruction, and wait until the host is dead."""
    at_upload = asked.id == "upload"
    released = asyncio.Event()
    fake.hold_uploads = released if at_upload else None
    fake.instruct(asked)
    if at_upload:
        await fake.until(lambda: fake.held_uploads == 1)
        await kill(host)
    async with asyncio.timeout(240):
        await host.ended()
    released.set()
    fake.hold_uploads = None
    await fake.until(lambda: fake.hosts == 0)


async def check_limit(folder: Path, federation: TestFederation, state: Path) -> None:
    """Check that budget spent before kills counts for another coordinator and in another run."""
    charged = len(ledger(state))
    policy = DisclosurePolicy()
    spent = spent_in_epoch(PrivacyLedger(state / "privacy").of("client-0"), policy).epsilon_spent
    scene = Scene(folder, federation)
    asked = private("renamed", scene.model())
    asked.run_id = "renamed"
    async with (
        serving(scene.fake, federation.coordinator) as scene.port,
        scene.host(state_directory=state, disclosure={"training_epsilon": spent}),
    ):
        scene.fake.instruct(asked)
        answer = await scene.fake.answered("renamed")
    assert answer.failure.message == f"client 'client-0': {BUDGET_SPENT}"
    assert len(ledger(state)) == charged


# Runs --------------------------------------------------------------------------------------------


async def test_private_run_finishes_without_the_host_at_its_limit(tmp_path: Path) -> None:
    async with profile_federation(
        tmp_path,
        selector="uniform",
        clients=4,
        count=2,
        rounds=3,
        assignments=[
            "privacy.noise_multiplier=1.0",
            "privacy.clip=1.0",
            "round.quorum=0.5",
            "strategy.name=scaffold",  # clients also send and keep control variates
        ],
        start_hosts=False,
    ) as federation:
        limited, free = federation.files.hosts
        disclosure = tomlkit.parse(limited.read_text()).get("disclosure", {})
        set_values(limited, {"disclosure": {**disclosure, "training_epsilon": 0.01}})
        await federation.start_hosts()
        run_id = await federation.start_run()
        await federation.finished(run_id)
        states = [federation.files.folder / path.stem for path in (limited, free)]
        charged = [sorted(state.glob("privacy/*.jsonl")) for state in states]
        assert charged[0] == []
        assert charged[1]
        shown = run_program(
            "potluck-client", "privacy", "--config", str(free), folder=federation.files.folder
        )
        text = shown.stdout.decode()
        assert shown.returncode == 0, shown.stderr
        assert "trainings and answers with noise spent ε = " in text
        assert f"run {run_id}" in text
        refused = run_program(
            *("potluck-client", "privacy", "--json", "--config", str(limited)),
            folder=federation.files.folder,
        )
        runs = [run for each in json.loads(refused.stdout)["clients"] for run in each["runs"]]
        assert runs
        assert all(run["refused"] >= 1 and run["sent"] == 0 for run in runs)
        ledgers = run_program(
            *("potluck-client", "privacy", "--json", "--config", str(free)),
            folder=federation.files.folder,
        )
        committed = await federation.history(run_id)
        spent = {c: loss for each in committed for c, loss in each.privacy.clients.items()}
        assert spent == {
            each["client"]: pytest.approx(each["training"]["epsilon_spent"], abs=1e-5)
            for each in json.loads(ledgers.stdout)["clients"]
        }
        assert committed[-1].privacy.largest == max(spent.values())
        assert committed[-1].privacy.refused >= 1


async def test_private_run_with_pow_d_selects_by_noisy_losses(tmp_path: Path) -> None:
    async with profile_federation(
        tmp_path,
        selector="pow-d",
        clients=4,
        count=2,
        rounds=2,
        assignments=["privacy.epsilon=6.0", "privacy.clip=1.0"],
        start_hosts=False,
    ) as federation:
        for path in federation.files.hosts:
            disclosure = tomlkit.parse(path.read_text()).get("disclosure", {})
            set_values(path, {"disclosure": {**disclosure, "questions": ["loss"]}})
        await federation.start_hosts()
        await federation.finished(await federation.start_run())
        states = [federation.files.folder / path.stem for path in federation.files.hosts]
    charged = [
        json.loads(line)["kind"]
        for state in states
        for path in state.glob("privacy/*.jsonl")
        for line in path.read_text().splitlines()[1:]
    ]
    assert charged.count("training") == 4
    assert charged.count("answer") == 8, "each round asks twice as many candidates as it selects"
