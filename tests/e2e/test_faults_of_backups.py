"""Backups made while rounds commit, and restored after crashes: the run resumes from them."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from support.boundaries import command_points, killed_command, refuses_to_serve
from support.evidence import check_files, left_over
from support.federation import SERVER_COMMAND, Federation, crash_federation, until
from support.repository import ROOT

from potluck.rpc.v1 import operator_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Federation]:
    folder = tmp_path_factory.mktemp("backups")
    # The coordinator is stopped while several commands run, on a machine that may be busy.
    patience = ["round.grace_seconds=80"]
    async with crash_federation(
        folder, rounds=6, assignments=patience, witnessed=SERVER_COMMAND
    ) as federation:
        yield federation


async def course_of(federation: Federation, run_id: str) -> list[str]:
    """Wait until a run has finished; return its rounds: members, their troubles, and the model.

    So a run with another model shows in which round, and by which client, it became another one.
    """
    await federation.finished(run_id)
    return [
        "; ".join(
            [
                f"round {each.round}",
                *(
                    f"{m.client_id} {operator_pb2.MemberState.Name(m.state)} {m.trouble}"
                    for m in each.members
                ),
                each.model_blake3,
            ]
        )
        for each in await federation.history(run_id)
    ]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(shared: Federation) -> list[str]:
    """Return the rounds of a run without faults."""
    return await course_of(shared, await shared.start_run())


def commands_on_the_page() -> list[str]:
    """Return the commands of the page's section."""
    page = (ROOT / "docs/operate/backup.md").read_text()
    [section] = re.findall(r"^## Backup and restore\n(.*?)^## ", page, re.MULTILINE | re.DOTALL)
    found: list[str] = re.findall(r"^\$ (potluck-server .*)$", section, re.MULTILINE)
    return found


async def typed(federation: Federation, command: str) -> tuple[int, str]:
    """Run a command in the folder of the coordinator's configuration."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    process = await asyncio.create_subprocess_shell(
        command,
        cwd=federation.files.coordinator.parent,
        env={**os.environ, "PATH": path},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode()


async def test_documented_commands_restore_a_run_after_a_crash(
    shared: Federation, undisturbed: list[str]
) -> None:
    back_up, restore = commands_on_the_page()
    run_id = await shared.before_round_two()
    code, output = await typed(shared, back_up)
    assert code == 0, output
    folder = re.escape(str(shared.files.folder / "backup-1"))
    assert re.fullmatch(rf"2 runs and \d+ model files are in {folder}\n", output)
    shared.points.release()
    await shared.until_committed(run_id, 4)
    code, output = await typed(shared, restore)
    assert code == 1
    assert "in use by another coordinator" in output
    await shared.kill_coordinator()
    database = shared.state / "potluck.sqlite3"
    assert database.with_name(f"{database.name}-wal").exists()  # the crash left the log behind
    code, output = await typed(shared, restore)
    assert code == 0, output
    assert not database.with_name(f"{database.name}-wal").exists()
    shared.points.hold("select")  # until the test has looked
    await shared.restart_coordinator()
    status = await shared.status(run_id)
    assert status.state == operator_pb2.RUN_STATE_RUNNING, status.reason
    shared.points.release()
    assert await course_of(shared, run_id) == undisturbed
    assert [each.round for each in await shared.history(run_id)] == [1, 2, 3, 4, 5, 6]
    assert await typed(shared, back_up) == (
        1,
        f"potluck-server: {shared.files.folder / 'backup-1'} already exists; name a new folder\n",
    )


@pytest.mark.slow
async def test_backup_during_rounds_is_complete(
    shared: Federation, undisturbed: list[str], tmp_path: Path
) -> None:
    """Models are deleted after every round, and the backup takes longer than a round."""
    shared.points.clear()
    run_id = await shared.start_run("rounds=40")
    await shared.until_committed(run_id, 1)
    code, output = await shared.server_command("backup", str(tmp_path / "b"))
    assert code == 0, output
    assert "warning" not in output
    await shared.finished(run_id)
    ended = (await shared.status(run_id)).model_blake3
    await shared.kill_coordinator()
    code, output = await shared.server_command("restore", str(tmp_path / "b"))
    assert code == 0, output
    await shared.restart_coordinator()
    assert await shared.finished(run_id) == ended


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "later"), [("select", "weigh"), ("weigh", "observe"), ("observe", "weigh")]
)
async def test_backup_during_a_round_is_restored_after_a_kill(
    shared: Federation, undisturbed: list[str], tmp_path: Path, point: str, later: str
) -> None:
    shared.points.clear()
    shared.points.hold(point)
    run_id = await shared.start_run()
    await until(lambda: shared.points.reached(point))
    code, output = await shared.server_command("backup", str(tmp_path / "b"))
    assert code == 0, output
    shared.points.hold(later)
    shared.points.release(point)
    await until(lambda: shared.points.reached(later))
    shared.points.kill(point)  # in round 2
    shared.points.release()
    await shared.coordinator.ended()
    code, output = await shared.server_command("restore", str(tmp_path / "b"))
    assert code == 0, output
    shared.points.kill(point)
    await shared.processes.start_coordinator()
    await shared.coordinator.ended()
    await shared.restart_coordinator()
    assert await course_of(shared, run_id) == undisturbed
    assert [each.round for each in await shared.history(run_id)] == [1, 2, 3, 4, 5, 6]


async def test_interrupted_restore_is_an_error_with_a_remedy_and_can_be_repeated(
    shared: Federation, undisturbed: list[str], tmp_path: Path
) -> None:
    shared.points.clear()
    run_id = await shared.before_round_two()
    code, output = await shared.server_command("backup", str(tmp_path / "b"))
    assert code == 0, output
    shared.points.release()
    await shared.until_committed(run_id, 2)
    await shared.kill_coordinator()
    # The state after a kill between the removal of the log and the replacement of the database.
    (shared.state / "restoring").write_text(str(tmp_path / "b"))
    (shared.state / "potluck.sqlite3-wal").unlink(missing_ok=True)
    remedy = f"repeat it with `potluck-server restore {tmp_path / 'b'}`"
    for command in ((), ("backup", str(tmp_path / "c"))):
        code, output = await shared.server_command(*command)
        assert code == 1
        assert remedy in output
    code, output = await shared.server_command("restore", str(tmp_path / "b"))
    assert code == 0, output
    await shared.restart_coordinator()
    assert await course_of(shared, run_id) == undisturbed


@pytest.mark.slow
async def test_run_finishes_after_a_restore_killed_at_any_write(
    shared: Federation, undisturbed: list[str], tmp_path: Path
) -> None:
    shared.points.clear()
    run_id = await shared.before_round_two()
    backup = tmp_path / "backup"
    code, output = await shared.server_command("backup", str(backup))
    assert code == 0, output
    shared.points.clear()
    await shared.until_committed(run_id, 4)
    await shared.kill_coordinator()
    crashed = tmp_path / "crashed"
    shutil.copytree(shared.state, crashed)
    points = await command_points(shared, "restore", backup)
    restored = contents(shared.state)
    interrupted: list[str] = []
    finished: list[dict[str, bytes]] = []
    for point in points:
        shutil.rmtree(shared.state)
        shutil.copytree(crashed, shared.state)
        await killed_command(shared, point, "restore", backup)
        if (shared.state / "restoring").exists():
            if not interrupted or point.startswith("after-rename"):
                await refuses_to_serve(shared, backup)
            interrupted.append(point)
            code, output = await shared.server_command("restore", str(backup))
            assert code == 0, output
            assert contents(shared.state) == restored, point
        if contents(shared.state) in finished:
            continue  # the coordinator was already started with equal files
        finished.append(contents(shared.state))
        await shared.restart_coordinator()
        assert await course_of(shared, run_id) == undisturbed, point
        assert [each.round for each in await shared.history(run_id)] == [1, 2, 3, 4, 5, 6]
        check_files(shared)
        await shared.kill_coordinator()
    assert {"after-delete-state.sqlite3-wal-1", "after-rename-state.sqlite3-1"} < {*interrupted}
    # After other kills, the old or the restored state was complete.
    assert len(interrupted) < len(points)
    assert len(finished) > 1
    await shared.restart_coordinator()
    assert await course_of(shared, run_id) == undisturbed


@pytest.mark.slow
async def test_killed_backup_does_not_affect_the_run_and_can_be_repeated(
    shared: Federation, undisturbed: list[str], tmp_path: Path
) -> None:
    shared.points.clear()
    run_id = await shared.before_round_two()
    points = await command_points(shared, "backup", tmp_path / "first" / "backup")
    for number, point in enumerate(points[:-1]):
        backup = tmp_path / str(number) / "backup"
        await killed_command(shared, point, "backup", backup)
        assert not backup.exists()
        code, output = await shared.server_command("restore", str(backup))
        assert code == 1
        assert f"{backup} is not a complete backup" in output
    backup = tmp_path / "0" / "backup"
    # It has its final name, so it is complete.
    await killed_command(shared, points[-1], "backup", backup)
    shared.points.clear()
    assert await course_of(shared, run_id) == undisturbed
    await until(lambda: not left_over(shared), "models are deleted again")
    await shared.kill_coordinator()
    code, output = await shared.server_command("restore", str(backup))
    assert code == 0, output
    await shared.restart_coordinator()
    assert await course_of(shared, run_id) == undisturbed


def contents(state: Path) -> dict[str, bytes]:
    """Return all files except locks, which contain process ids."""
    files = [path for path in state.rglob("*") if path.is_file() and "lock" not in path.name]
    return {str(path.relative_to(state)): path.read_bytes() for path in files}


async def test_damaged_backup_is_refused_and_the_state_stays_unchanged(
    shared: Federation, tmp_path: Path
) -> None:
    code, output = await shared.server_command("backup", str(tmp_path / "b"))
    assert code == 0, output
    [model, *_] = (tmp_path / "b" / "state" / "models").glob("*.safetensors")
    content = bytearray(model.read_bytes())
    content[-1] ^= 1
    model.write_bytes(content)
    await shared.kill_coordinator()
    before = (shared.state / "potluck.sqlite3").read_bytes()
    code, output = await shared.server_command("restore", str(tmp_path / "b"))
    assert code == 1
    assert f"{model} is damaged: its BLAKE3 digest differs from the one in backup.json" in output
    assert (shared.state / "potluck.sqlite3").read_bytes() == before
    code, output = await shared.server_command("restore", str(tmp_path))
    assert code == 1
    assert "is not a complete backup" in output
    await shared.restart_coordinator()
