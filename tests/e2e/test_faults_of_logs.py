"""A flipped bit in SQLite's write-ahead log loses commits, and the coordinator reports the loss."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
import pytest_asyncio
import tomlkit
from support.federation import Federation, crash_federation, until
from support.stored import locked

from potluck.common.errors import NotFoundError, UnreachableError
from potluck.deploy.local.demo_files import reserved_port
from potluck.rpc.v1 import operator_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")
ROUNDS = 4
FIRST_PAGE = 32 + 24 + 100
"""Offset in bytes of a place in the page of a log's first frame, after the headers of log and
frame."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Federation]:
    folder = tmp_path_factory.mktemp("logs")
    with reserved_port() as port:
        settings = {"metrics_address": f"127.0.0.1:{port}"}
        async with crash_federation(folder, rounds=ROUNDS, coordinator=settings) as federation:
            yield federation


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(shared: Federation) -> str:
    """Return the digest of the final model of a run without faults."""
    return await shared.finished(await shared.start_run())


def write_ahead_log(federation: Federation) -> Path:
    return federation.state / "potluck.sqlite3-wal"


READ = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN")
connection.execute("SELECT count(*) FROM runs").fetchone()
print("reading", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def reader(federation: Federation) -> Iterator[None]:
    """Run a program that reads the database while the block runs, so that commits stay in the log.
    The program is killed, since the last process that closes the database empties the log."""
    command = [sys.executable, "-c", READ, str(federation.state / "potluck.sqlite3")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"reading\n"
        try:
            yield
        finally:
            process.kill()


def readiness(federation: Federation) -> str:
    """Return the reason that /readyz gives; empty if the coordinator is ready."""
    settings = tomlkit.parse(federation.files.coordinator.read_text())
    try:
        with urlopen(f"http://{settings['metrics_address']}/readyz", timeout=60):
            return ""
    except HTTPError as error:
        return str(error.read().decode())


def flip_a_bit(path: Path, place: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        [byte] = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1]))


async def test_rounds_lost_to_a_flipped_bit_are_reported(
    shared: Federation, undisturbed: str
) -> None:
    with reader(shared):
        run_id = await shared.before_round_two()
        size = write_ahead_log(shared).stat().st_size
        shared.points.release()
        await shared.until_committed(run_id, 3)
        await shared.kill_coordinator()
    flip_a_bit(write_ahead_log(shared), size + 24 + 100)  # in the page of the next frame
    models = {path.name for path in shared.state.glob("models/*.safetensors")}
    await shared.restart_coordinator()
    status = await shared.status(run_id)
    assert status.state == operator_pb2.RUN_STATE_FAILED
    assert 1 <= status.committed_rounds < 3
    assert "committed but" in status.reason
    assert f"ends with round {status.committed_rounds}" in status.reason
    assert f"`potluck resume {run_id}`" in status.reason
    assert status.reason in shared.files.log("coordinator").read_text()
    # The loss is reported until the operator decides; the models stay, so a backup of the database
    # could use them.
    await shared.kill_coordinator()
    await shared.restart_coordinator()
    assert (await shared.status(run_id)).reason == status.reason
    assert models <= {path.name for path in shared.state.glob("models/*.safetensors")}
    await shared.operator.resume_run(run_id)
    assert await shared.finished(run_id) == undisturbed
    await shared.kill_coordinator()
    await shared.restart_coordinator()
    assert (await shared.status(run_id)).state == operator_pb2.RUN_STATE_FINISHED


async def test_flipped_bit_loses_at_most_the_last_round_if_no_files_are_deleted(
    shared: Federation,
) -> None:
    """Its strategy and selector keep no files, and its retention keeps all models."""
    nothing_deleted = ["selector.name=uniform", "strategy.name=fedavg", "rounds=6", "seed=8"]
    nothing_deleted.append("retention.keep_last=100")
    undisturbed = await shared.finished(await shared.start_run(*nothing_deleted))
    shared.points.clear()
    run_id = await shared.start_run(*nothing_deleted)
    await shared.until_committed(run_id, 4)
    await shared.kill_coordinator()
    log = write_ahead_log(shared)
    if log.stat().st_size > FIRST_PAGE:  # else all commits are in the database
        flip_a_bit(log, FIRST_PAGE)
    await shared.restart_coordinator()
    status = await shared.status(run_id)
    assert status.committed_rounds >= 3
    if status.state == operator_pb2.RUN_STATE_FAILED:
        await shared.operator.resume_run(run_id)
    assert await shared.finished(run_id) == undisturbed


async def test_run_lost_from_the_database_is_reported_and_rebuilt(
    shared: Federation, undisturbed: str
) -> None:
    with reader(shared):
        size = write_ahead_log(shared).stat().st_size
        run_id = await shared.start_run()
        await shared.until_committed(run_id, 2)  # the journal then lists round 1
        await shared.kill_coordinator()
    flip_a_bit(write_ahead_log(shared), size + 24 + 100)
    await shared.restart_coordinator()
    runs = await shared.operator.list_runs()
    assert run_id not in {status.run_id for status in runs}
    assert f"run {run_id} with" in shared.files.log("coordinator").read_text()
    [reason] = await shared.operator.lost_runs()
    assert f"run {run_id} with" in reason
    assert "stop the coordinator and restore them with `potluck-server rebuild`" in reason
    with pytest.raises(NotFoundError) as refused:
        await shared.operator.resume_run(run_id[:6])
    assert refused.value.message == reason
    assert await shared.finished(await shared.start_run()) == undisturbed
    code, output = await shared.server_command("rebuild")
    assert code == 1
    assert "in use by another coordinator" in output
    await shared.kill_coordinator()
    code, output = await shared.server_command("rebuild")
    assert (code, f"run {run_id} is rebuilt up to round " in output) == (0, True)
    await shared.restart_coordinator()
    assert await shared.operator.lost_runs() == []
    status = await shared.status(run_id)
    assert status.state == operator_pb2.RUN_STATE_STOPPED
    assert status.committed_rounds >= 1
    await shared.operator.resume_run(run_id)
    assert await shared.finished(run_id) == undisturbed


async def test_a_run_waits_for_a_database_that_another_program_locks(
    shared: Federation, undisturbed: str
) -> None:
    process = shared.coordinator.group
    shared.points.clear()
    shared.points.hold("weigh")
    run_id = await shared.start_run()
    await until(lambda: shared.points.reached("weigh"))
    log = shared.files.log("coordinator")
    assert readiness(shared) == ""
    with locked(shared.state / "potluck.sqlite3"):
        shared.points.release()
        await until(lambda: "waiting for the database" in log.read_text())
        assert "another program has locked it" in readiness(shared)
        for ask in (shared.operator.list_runs, shared.operator.list_clients):
            with pytest.raises(UnreachableError) as refused:
                await ask()
            assert "potluck.sqlite3: another program has locked it" in refused.value.message
    assert await shared.finished(run_id) == undisturbed
    assert "database connected again" in log.read_text()
    assert shared.coordinator.group == process


async def test_destroyed_database_is_rebuilt_from_round_records(
    shared: Federation, undisturbed: str
) -> None:
    over = await shared.start_run()
    assert await shared.finished(over) == undisturbed
    run_id = await shared.before_round_two()
    record = shared.state / "records" / run_id / "1"
    await until(record.is_file)
    before = [await shared.history(each) for each in (over, run_id)]
    database = shared.state / "potluck.sqlite3"
    database.write_bytes(b"garbage" * 1000)
    await until(lambda: "potluck.sqlite3: the file is damaged" in readiness(shared))
    await shared.kill_coordinator()
    shared.points.release()
    code, output = await shared.server_command()
    assert code == 1
    assert "or run `potluck-server rebuild`" in output
    code, output = await shared.server_command("rebuild")
    assert code == 0, output
    assert "renamed to potluck.sqlite3.damaged-1, and a new file is created" in output
    assert f"run {run_id} is rebuilt up to round 1" in output
    await shared.restart_coordinator()
    assert [await shared.history(each) for each in (over, run_id)] == before
    assert (await shared.status(over)).state == operator_pb2.RUN_STATE_FINISHED
    await shared.operator.resume_run(run_id)
    assert await shared.finished(run_id) == undisturbed
    assert (await shared.history(run_id))[:1] == before[1]


async def test_older_backup_of_the_database_alone_is_reported(
    shared: Federation, undisturbed: str, tmp_path: Path
) -> None:
    database = shared.state / "potluck.sqlite3"
    await shared.kill_coordinator()
    await shared.restart_coordinator()
    run_id = await shared.before_round_two("rounds=6")
    opened = contextlib.closing
    with (
        opened(sqlite3.connect(database)) as source,
        opened(sqlite3.connect(tmp_path / "backup")) as copy,
    ):
        source.backup(copy)
    shared.points.release()
    await shared.until_committed(run_id, 5)
    await shared.kill_coordinator()
    for path in shared.state.glob("potluck.sqlite3-*"):
        if path.suffix != ".lock":
            path.unlink()
    shutil.copyfile(tmp_path / "backup", database)
    await shared.restart_coordinator()
    status = await shared.status(run_id)
    assert status.state == operator_pb2.RUN_STATE_FAILED
    assert "an older backup was restored" in status.reason
    await shared.operator.resume_run(run_id)  # the run's models are deleted
    status = await shared.ended(run_id)
    assert status.state == operator_pb2.RUN_STATE_FAILED
    assert ".safetensors is missing, so that the run can't continue after round" in status.reason
    assert status.reason.endswith(f"restore the file from a backup; then `potluck resume {run_id}`")
    assert await shared.finished(await shared.start_run()) == undisturbed
