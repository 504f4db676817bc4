"""The client process as it is started, stopped and killed."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.client_host import (
    digits_model,
    evaluate_instruction,
    host_config,
    reference,
    train_instruction,
    write_config,
)
from support.fake_coordinator import FakeCoordinator, serving
from support.pki import TestFederation

from potluck.client.config import example_config
from potluck.common.errors import ProtocolVersionError
from potluck.common.net.protocol import VERSIONS
from potluck.rpc.v1 import transfer_pb2

COMMAND = (sys.executable, "-m", "potluck.client.cli")
PATIENCE_SECONDS = 240


@pytest.fixture
async def fake(federation: TestFederation) -> AsyncIterator[FakeCoordinator]:
    fake = FakeCoordinator()
    async with serving(fake, federation.coordinator) as port:
        fake.port = port
        yield fake


@asynccontextmanager
async def host(
    folder: Path,
    federation: TestFederation,
    port: int,
    *,
    prefix: Sequence[str] = (),
    **changes: Any,
) -> AsyncIterator[Process]:
    """Run a client process; kill it at the end if it still runs."""
    config = host_config(folder, federation.hosts["host-0"], port, **changes)
    path = write_config(config, folder / "host.toml")
    arguments = [*prefix, *COMMAND, "--config", str(path), "--log-format", "json"]
    process = await asyncio.create_subprocess_exec(*arguments, stderr=PIPE)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def ended(process: Process) -> tuple[int, list[str]]:
    """Return the exit code and the lines on stderr."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        _, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, errors.decode().splitlines()


def offer_model(fake: FakeCoordinator, folder: Path) -> transfer_pb2.ModelReference:
    content = digits_model(folder)
    return reference(fake.offer(content), len(content))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
async def test_client_process_trains_and_stops_on_sigterm_during_training(
    tmp_path: Path,
    federation: TestFederation,
    fake: FakeCoordinator,
    number: signal.Signals,
    code: int,
) -> None:
    model = offer_model(fake, tmp_path)
    async with host(tmp_path, federation, fake.port) as process:
        await fake.until(lambda: fake.hosts == 1)
        fake.instruct(train_instruction("a", model))
        assert (await fake.completed("a")).header.report.samples > 0
        fake.instruct(train_instruction("endless", model, training={"epochs": 10_000_000}))
        await fake.computing("endless")
        process.send_signal(number)
        returned, lines = await ended(process)
    assert returned == code
    events = [json.loads(line)["event"] for line in lines]  # only log lines, no traceback
    assert events[0] == "starting"
    assert set(json.loads(lines[0])) - {"event", "level", "timestamp"} == {
        *("version", "coordinator", "clients", "state")
    }, "settings are for debugging"
    assert events[-1] == "stopped"
    await fake.until(lambda: fake.hosts == 0)


async def test_process_killed_during_an_upload_delivers_the_update_after_a_restart(
    tmp_path: Path, federation: TestFederation, fake: FakeCoordinator
) -> None:
    model = offer_model(fake, tmp_path)
    fake.hold_uploads = asyncio.Event()
    async with host(tmp_path, federation, fake.port) as process:
        await fake.until(lambda: fake.hosts == 1)
        fake.instruct(train_instruction("a", model))
        await fake.until(lambda: len(fake.headers) == 1)
        process.kill()
        await fake.until(lambda: fake.hosts == 0)
    fake.hold_uploads = None
    fake.files.clear()  # a second training would fail
    for path in (tmp_path / "state" / "models").iterdir():
        path.unlink()
    async with host(tmp_path, federation, fake.port) as process:
        await fake.until(lambda: fake.hosts == 1)
        fake.instruct(train_instruction("a", model))
        upload = await fake.completed("a")
        process.terminate()
        assert (await ended(process))[0] == 0
    assert upload.header.blake3 == fake.headers[0].blake3


async def test_process_killed_during_a_download_resumes_it_after_a_restart(
    tmp_path: Path, federation: TestFederation, fake: FakeCoordinator
) -> None:
    model = offer_model(fake, tmp_path)
    fake.hold_downloads = asyncio.Event()
    async with host(tmp_path, federation, fake.port) as process:
        await fake.until(lambda: fake.hosts == 1)
        fake.instruct(train_instruction("a", model))
        await fake.until(lambda: len(fake.fetches) == 1)
        process.kill()
        await fake.until(lambda: fake.hosts == 0)
    fake.hold_downloads = None
    (tmp_path / "state" / "fetched" / f"{model.blake3}.part").write_bytes(
        fake.files[model.blake3][:5000]
    )
    async with host(tmp_path, federation, fake.port):
        await fake.until(lambda: fake.hosts == 1)
        fake.instruct(train_instruction("a", model))
        await fake.completed("a")
    assert fake.fetches[1:] == [(model.blake3, 5000)]


async def test_full_disk_fails_the_training_but_not_the_process(
    tmp_path: Path, federation: TestFederation, fake: FakeCoordinator
) -> None:
    model = offer_model(fake, tmp_path)
    # No file may grow beyond 8 KiB: the system refuses to write, as on a full disk.
    prefix = ("bash", "-c", 'ulimit -f 8; exec "$@"', "bash")
    async with host(tmp_path, federation, fake.port, prefix=prefix) as process:
        await fake.until(lambda: fake.hosts == 1)
        fake.instruct(train_instruction("a", model))
        failure = (await fake.answered("a")).failure
        fake.instruct(evaluate_instruction("b", model))
        await fake.answered("b")
        assert list((tmp_path / "state" / "fetched").iterdir()) == []
        process.terminate()
        assert (await ended(process))[0] == 0
    assert failure.reason == "STORAGE_FAILED"
    assert "File too large" in failure.message


async def test_other_protocol_version_ends_the_process_with_one_line(
    tmp_path: Path, federation: TestFederation, fake: FakeCoordinator
) -> None:
    fake.refuse_hello = ProtocolVersionError("this coordinator speaks version 2, the host 1")
    async with host(tmp_path, federation, fake.port, log_level="error") as process:
        code, lines = await ended(process)
    assert code == 1
    assert lines == ["potluck-client: this coordinator speaks version 2, the host 1"]


@pytest.mark.parametrize(
    ("versions", "told"),
    [
        ({}, "none on the coordinator"),
        ({**VERSIONS, "framing": 2}, "(framing: version 3 on the host, 2 on the coordinator)"),
        ({**VERSIONS, "framing": 4}, "(framing: version 3 on the host, 4 on the coordinator)"),
    ],
    ids=["of the release before", "older", "newer"],
)
async def test_coordinator_of_an_incompatible_release_ends_the_process_with_one_line(
    tmp_path: Path,
    federation: TestFederation,
    fake: FakeCoordinator,
    versions: dict[str, int],
    told: str,
) -> None:
    fake.versions = versions
    async with host(tmp_path, federation, fake.port, log_level="error") as process:
        code, [line] = await ended(process)
    assert code == 1
    assert told in line
    mover = "host 'host-0'" if versions.get("framing", 0) > 3 else "the coordinator"
    assert line.endswith(f"upgrade Potluck on {mover}")
    assert not fake.acknowledged


async def test_second_process_on_a_state_directory_is_refused(
    tmp_path: Path, federation: TestFederation, fake: FakeCoordinator
) -> None:
    async with host(tmp_path, federation, fake.port):
        await fake.until(lambda: fake.hosts == 1)
        async with host(tmp_path, federation, fake.port, log_level="error") as second:
            code, lines = await ended(second)
    assert code == 1
    assert len(lines) == 1
    assert "in use by another client process" in lines[0]


async def run_command(*arguments: str) -> tuple[int, str, list[str]]:
    process = await asyncio.create_subprocess_exec(*COMMAND, *arguments, stdout=PIPE, stderr=PIPE)
    async with asyncio.timeout(PATIENCE_SECONDS):
        output, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode(), errors.decode().splitlines()


async def test_config_command_prints_the_example_configuration() -> None:
    assert await run_command("config") == (0, example_config(), [])


async def test_invalid_arguments_or_configuration_end_the_process_with_one_line(
    tmp_path: Path,
) -> None:
    path = tmp_path / "host.toml"
    path.write_text(example_config())
    cases = {
        (): "pass --config FILE",
        ("--config", str(tmp_path / "none.toml")): "can't read the configuration file",
        ("--config", str(path), "--device", "gpu"): "auto, cpu, cuda:N",
        ("--config", str(path), "--log-level", "error"): "can't be read",  # no certificates
    }
    results = await asyncio.gather(*(run_command(*arguments) for arguments in cases))
    for (code, _, lines), message in zip(results, cases.values(), strict=True):
        assert code != 0
        assert len(lines) == 1
        assert message in lines[0]
