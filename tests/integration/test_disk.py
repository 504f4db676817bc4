"""Disks that are full, read-only or damaged: one clear error, and no committed round is lost."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from support import mounts
from support.federation import Federation, crash_federation, until

from potluck.common.errors import RunError
from potluck.rpc.v1 import operator_pb2

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(bool(mounts.why_not()), reason=mounts.why_not() or "can mount"),
]
MEGABYTE = 1 << 20


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Federation]:
    """Run a coordinator whose state is on a small disk; models have two megabytes."""
    folder = tmp_path_factory.mktemp("disk")
    with mounts.tmpfs(folder / "state", megabytes=64) as state:
        async with crash_federation(
            folder,
            clients=2,
            hosts=2,
            count=2,
            rounds=2,
            assignments=["task.parameters=500000"],
            coordinator={"state_directory": str(state)},
        ) as federation:
            yield federation


@pytest_asyncio.fixture(loop_scope="module")
async def federation(shared: Federation) -> Federation:
    shared.points.clear()
    return shared


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(shared: Federation) -> str:
    """Return the digest of the final model of a run without faults."""
    return await shared.finished(await shared.start_run())


async def first_round(federation: Federation, run_id: str) -> str:
    """Return the model digest of a run after one committed round; check that the file is
    complete."""
    [entry] = await federation.history(run_id)
    answers = federation.operator.fetch_model(run_id, round_number=1, blake3="", offset=0)
    size = sum([len(answer.frame.chunk) async for answer in answers])
    assert size > 2_000_000
    return entry.model_blake3


async def refuses_to_start(federation: Federation) -> str:
    """Start the coordinator, check that it ends, and return its error."""
    await federation.processes.start_coordinator()
    with pytest.raises(RunError) as error:
        await federation.processes.until_ready()
    assert "exit code 1" in error.value.message
    return last_line(federation)


def last_line(federation: Federation) -> str:
    """Return the last line of the coordinator's log, which must hold no traceback."""
    text = federation.files.log("coordinator").read_text()
    assert "Traceback" not in text
    return text.splitlines()[-1]


def filled(federation: Federation, *, leave_bytes: int) -> Path:
    """Delete files that can be overwritten, then fill the disk; return the file that fills it."""
    for spares in ("spool/*/spare/*", "models.spare/*"):
        for spare in federation.state.glob(spares):
            spare.unlink()
    return mounts.fill(federation.state, leave_bytes=leave_bytes)


async def before_round_two(federation: Federation, *assignments: str) -> str:
    """Start a run, and hold it in the selection of round 2 until the work after the commit of round
    1 is done, which frees space: updates become spare files, and the database's log is emptied."""
    run_id = await federation.before_round_two(*assignments)
    spare, log = federation.state / "spool" / run_id / "spare", "potluck.sqlite3-wal"
    await until(lambda: len(list(spare.glob("*"))) == 2)
    await until(lambda: (federation.state / log).stat().st_size == 0)
    return run_id


async def test_disk_full_for_the_database_ends_the_coordinator_and_the_run_resumes(
    federation: Federation, undisturbed: str
) -> None:
    run_id = await before_round_two(federation)
    filler = filled(federation, leave_bytes=0)
    federation.points.release()
    assert await federation.coordinator.ended() == 1
    said = last_line(federation)
    assert said.startswith("potluck-server: ")
    assert "full" in said
    filler.unlink()
    await federation.restart_coordinator()
    assert await federation.finished(run_id) == undisturbed


async def test_disk_full_for_updates_fails_the_run_and_it_resumes(
    federation: Federation, undisturbed: str
) -> None:
    run_id = await before_round_two(federation)
    filler = filled(federation, leave_bytes=3 * MEGABYTE)  # space for one update, not for two
    federation.points.release()
    failed = await federation.ended(run_id)
    assert failed.state == operator_pb2.RUN_STATE_FAILED
    assert "No space left on device" in failed.reason
    assert "\n" not in failed.reason
    await first_round(federation, run_id)
    filler.unlink()
    await federation.operator.resume_run(run_id)
    assert await federation.finished(run_id) == undisturbed


async def test_failed_clean_up_fails_the_run_at_its_next_commit(
    federation: Federation,
) -> None:
    run_id = await before_round_two(federation, "rounds=3")
    spare = federation.state / "spool" / run_id / "spare"
    shutil.rmtree(spare)
    spare.write_text("the folder of old updates is gone")
    federation.points.release()
    ended = await federation.ended(run_id)
    assert ended.committed_rounds == 2
    assert ended.state == operator_pb2.RUN_STATE_FAILED
    assert str(spare) in ended.reason
    assert "\n" not in ended.reason
    assert len(await federation.history(run_id)) == 2


async def test_disk_full_for_the_model_fails_the_run_and_it_resumes(
    federation: Federation, undisturbed: str
) -> None:
    federation.points.hold("weigh")
    run_id = await federation.start_run()
    await until(lambda: federation.points.reached("weigh"))
    filler = filled(federation, leave_bytes=MEGABYTE)
    federation.points.release()
    failed = await federation.ended(run_id)
    assert failed.state == operator_pb2.RUN_STATE_FAILED
    assert "No space left on device" in failed.reason
    filler.unlink()
    await federation.operator.resume_run(run_id)
    assert await federation.finished(run_id) == undisturbed


async def test_a_damaged_update_is_sent_again(federation: Federation, undisturbed: str) -> None:
    federation.points.kill("weigh")
    run_id = await federation.start_run()
    assert await federation.coordinator.ended() == 137
    damage(federation.spooled()[0])
    await federation.restart_coordinator()
    assert await federation.finished(run_id) == undisturbed


async def test_a_damaged_model_fails_its_run(federation: Federation, undisturbed: str) -> None:
    run_id = await federation.before_round_two()
    blake3 = await first_round(federation, run_id)
    await federation.kill_coordinator()
    federation.points.release()
    with damaged(federation.state / "models" / f"{blake3}.safetensors"):
        await federation.restart_coordinator()
        failed = await federation.ended(run_id)
        assert failed.state == operator_pb2.RUN_STATE_FAILED
        assert f"{blake3}.safetensors is damaged" in failed.reason
        assert failed.committed_rounds == 1
    await federation.operator.resume_run(run_id)
    assert await federation.finished(run_id) == undisturbed


async def test_a_damaged_database_row_fails_its_run(
    federation: Federation, undisturbed: str
) -> None:
    run_id = await federation.before_round_two()
    await federation.kill_coordinator()
    federation.points.release()
    database = federation.state / "potluck.sqlite3"
    with changed_row(database, "UPDATE rounds SET committed_at = ?", "yesterday"):
        await federation.restart_coordinator()
        failed = await federation.ended(run_id)
        assert failed.state == operator_pb2.RUN_STATE_FAILED
        assert f"{database}: table rounds, run_id '{run_id}'" in failed.reason
        assert "column committed_at" in failed.reason
        await federation.kill_coordinator()
    await federation.restart_coordinator()
    await federation.operator.resume_run(run_id)
    assert await federation.finished(run_id) == undisturbed


async def test_coordinator_refuses_to_start_on_a_read_only_disk(
    federation: Federation, tmp_path: Path
) -> None:
    from support.federation import set_values

    await federation.kill_coordinator()
    before = federation.state
    with mounts.tmpfs(tmp_path / "state", megabytes=1, read_only=True) as state:
        set_values(federation.files.coordinator, {"state_directory": str(state)})
        said = await refuses_to_start(federation)
    assert "Read-only file system" in said
    assert str(state) in said
    set_values(federation.files.coordinator, {"state_directory": str(before)})


def damage(path: Path) -> None:
    """Change one byte of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@contextlib.contextmanager
def damaged(path: Path) -> Iterator[None]:
    damage(path)
    yield
    damage(path)


@contextlib.contextmanager
def changed_row(path: Path, statement: str, value: str) -> Iterator[None]:
    """Change a column, and restore it afterwards."""
    column = statement.split(" SET ")[1].split()[0]
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        rows = database.execute(f"SELECT rowid, {column} FROM rounds").fetchall()  # noqa: S608  columns of our own
        database.execute(statement, (value,))
    yield
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        for row, old in rows:
            database.execute(f"UPDATE rounds SET {column} = ? WHERE rowid = ?", (old, row))  # noqa: S608  columns of our own
