"""Disclosures of a client process that is killed, asked repeatedly, or asked for too much."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.client_host import digits_model, host_config, reference, write_config
from support.fake_coordinator import FakeCoordinator, serving
from support.federation import until
from support.pki import TestFederation

from potluck.client.disclosure.disclosure_policy import DisclosurePolicy
from potluck.common.disclosure import Mode, Request
from potluck.common.learning.triplet import TripletSettings
from potluck.common.names import ClientId
from potluck.common.tasks.digits import Digits
from potluck.rpc.v1 import coordinator_pb2 as rpc

NOISY = Request(mode=Mode.NOISY)
TASK = rpc.Plugin(name="digits", options_json='{"clients": 6}')


@pytest.fixture
async def fake(federation: TestFederation) -> AsyncIterator[FakeCoordinator]:
    fake = FakeCoordinator()
    async with serving(fake, federation.coordinator) as port:
        fake.port = port
        yield fake


@asynccontextmanager
async def host(
    folder: Path, federation: TestFederation, fake: FakeCoordinator, **policy: Any
) -> AsyncIterator[Process]:
    """Run a connected client process; kill it at the end."""
    config = host_config(
        folder, federation.hosts["host-0"], fake.port, disclosure=DisclosurePolicy(**policy)
    )
    path = write_config(config, folder / "host.toml")
    command = [sys.executable, "-m", "potluck.client.cli", "--config", str(path)]
    with (folder / "log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(*command, stdin=DEVNULL, stderr=log)
    try:
        await fake.until(lambda: fake.hosts == 1)
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await fake.until(lambda: fake.hosts == 0)


def disclose(
    name: str, request: Request = NOISY, *, signal: str = "label_counts", run: str = "run"
) -> rpc.Instruction:
    instruction = rpc.Instruction(
        id=name,
        client_id="client-0",
        run_id=run,
        disclose=rpc.Disclose(signal=signal, parameters_json=request.canonical(), task=TASK),
    )
    instruction.time_left.FromSeconds(60)
    return instruction


async def asked(fake: FakeCoordinator, instruction: rpc.Instruction) -> rpc.Answer:
    fake.instruct(instruction)
    return await fake.answered(instruction.id)


async def test_process_killed_while_disclosing_makes_one_disclosure(
    tmp_path: Path, federation: TestFederation, fake: FakeCoordinator
) -> None:
    ledger = tmp_path / "state" / "disclosures" / "client-0.json"
    async with host(tmp_path, federation, fake) as process:
        fake.instruct(disclose("a"))
        await until(ledger.exists, "a release on disk")
        process.kill()  # killed before or after it sent the answer
        await process.wait()
    kept = ledger.read_text()
    async with host(tmp_path, federation, fake):
        profile = (await asked(fake, disclose("b"))).profile
        [release] = json.loads(kept)["releases"]
        assert profile.payload_json == release["payload_json"]
        assert ledger.read_text() == kept  # same recipient: nothing is added
        again = (await asked(fake, disclose("c", run="another"))).profile
        assert again == profile
    said = [answer.profile.payload_json for answer in fake.answers if answer.HasField("profile")]
    assert set(said) == {release["payload_json"]}
    [now] = json.loads(ledger.read_text())["releases"]
    assert [each["run"] for each in now["recipients"]] == ["run", "another"]
    lines = (tmp_path / "log").read_text().splitlines()
    [told] = [event for line in lines if "for run another" in (event := json.loads(line)["event"])]
    assert told.startswith("disclosed the label counts, with noise (ε = 1, replace), of client-0")
    assert told.endswith("this repeats an earlier disclosure and spends no budget")


async def test_repeated_requests_receive_the_same_noisy_counts(
    tmp_path: Path, federation: TestFederation, fake: FakeCoordinator
) -> None:
    """The attack averages the noise. With fresh draws, the mean of 1,000 answers would nearly equal
    the counts. But all answers are the same, so the mean has the error of a single draw."""
    async with host(tmp_path, federation, fake, epsilon=0.1, epsilon_budget=0.1):
        for number in range(1000):
            fake.instruct(disclose(f"ask-{number}", run=f"run-{number % 20}"))
        await fake.until(lambda: len(fake.answers) >= 1000)
        await asked(fake, disclose("more", NOISY.model_copy(update={"epsilon": 0.05})))
    answers = {answer.instruction_id: answer for answer in fake.answers}
    said = [json.loads(answers[f"ask-{n}"].profile.payload_json) for n in range(1000)]
    counts = np.array([each["label_counts"] for each in said], dtype=np.float64)
    true = np.bincount(Digits(clients=6).client_data(ClientId("client-0"), None).train.labels)
    one, mean = counts[0] - true, counts.mean(axis=0) - true
    np.testing.assert_array_equal(mean, one)
    assert np.abs(one).max() > 0
    assert answers["more"].failure.reason == "DISCLOSURE_REFUSED"  # and no second draw


async def test_disclosures_command_shows_each_disclosure_and_the_spent_epsilon(
    tmp_path: Path, federation: TestFederation, fake: FakeCoordinator
) -> None:
    async with host(tmp_path, federation, fake, epsilon=0.25, epsilon_budget=0.5):
        payload = (await asked(fake, disclose("a"))).profile.payload_json
        wishes = [Request(mode=Mode.NOISY, epsilon=epsilon) for epsilon in (0.2, 0.1)]
        await asked(fake, disclose("less", wishes[0]))
        answer = await asked(fake, disclose("least", wishes[1]))
        assert answer.failure.reason == "DISCLOSURE_REFUSED"
        assert "epsilon_budget" in answer.failure.message
        config = ["--config", str(tmp_path / "host.toml")]
        text = await shown(*config)
        values = json.loads(await shown(*config, "--json"))
    assert "client-0: ε = 0.45 of 0.5 spent" in text
    assert payload in text
    [client] = values["clients"]
    assert [each["epsilon"] for each in client["disclosures"]] == [0.25, 0.2]
    assert client["disclosures"][0]["recipients"][0]["federation"] == federation.name


async def shown(*arguments: str) -> str:
    command = [sys.executable, "-m", "potluck.client.cli", "disclosures", *arguments]
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE)
    output, _ = await process.communicate()
    assert process.returncode == 0
    return output.decode()


async def test_host_discloses_only_what_its_own_policy_allows(
    tmp_path: Path, federation: TestFederation, fake: FakeCoordinator
) -> None:
    content = digits_model(tmp_path)
    model = reference(fake.offer(content), len(content))
    settings = TripletSettings(bias_steps=2, attribute_steps=2)
    plain = Request(mode=Mode.EXACT_TRIPLET, settings=settings)
    noisy = Request(mode=Mode.NOISY_TRIPLET, settings=settings)
    async with host(tmp_path, federation, fake):
        exact = await asked(fake, disclose("exact", Request(mode=Mode.EXACT)))
        bare = await asked(fake, disclose("plain", plain, signal="triplet"))
        unknown = await asked(fake, disclose("salaries", signal="salaries"))
        instruction = disclose("triplet", noisy, signal="triplet")
        instruction.disclose.model.CopyFrom(model)
        triplet = await asked(fake, instruction)
    assert [each.failure.reason for each in (exact, bare, unknown)] == [
        "DISCLOSURE_REFUSED",
        "DISCLOSURE_REFUSED",
        "PROTOCOL_VIOLATED",
    ]
    assert fake.hellos[0].data_epoch == 1
    payload = json.loads(triplet.profile.payload_json)
    assert all(0 <= share <= 1 for share in payload["triplet"])
    assert payload["degenerate"] is None  # it would have no noise
    assert json.loads(triplet.profile.parameters_json)["model"] == model.blake3
