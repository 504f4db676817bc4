"""`potluck deploy slurm` on a real cluster of one node."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tomlkit
from support.cluster import cluster, require_slurm
from support.federation import Federation, crash_federation, until

from potluck.deploy.local.demo_files import program

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def write_inventory(federation: Federation, shared: Path) -> Path:
    """Write an inventory of two hosts that already have certificates."""
    machines = []
    for number, clients in enumerate(("client-0:1", "client-2:3")):
        host = {
            "name": f"host-{number}",
            "clients": [clients],
            "settings": {"reconnect_maximum_seconds": 0.3},
        }
        slurm = {
            "directory": str(shared),
            "options": ["--ntasks=1", "--cpus-per-task=1"],
            "setup": [f"export PATH={Path(sys.executable).parent}:$PATH"],
        }
        entry = {"name": f"node-{number}", "engine": "slurm", "slurm": slurm, "hosts": [host]}
        machines.append(entry)
    inventory = {
        "federation": "demo",
        "address": federation.files.operator.coordinator,
        "pki": "pki",
        "machines": machines,
    }
    path = federation.files.folder / "federation.toml"
    path.write_text(tomlkit.dumps(inventory))
    return path


def commands(environment: dict[str, str], file: Path) -> Callable[..., str]:
    def potluck(*arguments: str, fails: bool = False) -> str:
        done = subprocess.run(
            [program("potluck"), "deploy", "slurm", *arguments, "--file", str(file)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert (done.returncode != 0) == fails, done.stdout + done.stderr
        return done.stderr if fails else done.stdout

    return potluck


def break_setup(file: Path) -> None:
    document = tomlkit.parse(file.read_text()).unwrap()
    for machine in document["machines"]:
        machine["slurm"]["setup"] = ["echo no such module", "exit 3"]
    file.write_text(tomlkit.dumps(document))


def state_of(job: str, environment: dict[str, str]) -> str:
    said = subprocess.run(
        ["squeue", "--noheader", "--jobs", job, "--format", "%T"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return said.stdout.strip()


def requeue(job: str, environment: dict[str, str]) -> None:
    subprocess.run(["scontrol", "requeue", job], env=environment, check=True, timeout=60)


async def test_slurm_jobs_finish_a_run_despite_a_requeue(tmp_path: Path) -> None:
    require_slurm()
    shared = tmp_path / "shared"
    async with crash_federation(
        tmp_path,
        clients=4,
        hosts=2,
        count=4,
        rounds=3,
        start_hosts=False,
        assignments=["round.grace_seconds=120"],
    ) as federation:
        with cluster() as environment:
            potluck = commands(environment, write_inventory(federation, shared))
            submitted = potluck("up")
            jobs = re.findall(r"node-[01]: job ([0-9]+): submitted", submitted)
            assert len(jobs) == 2, submitted
            await federation.until_attending()
            assert potluck("up").count("nothing to do") == 2
            assert potluck("status").count("RUNNING") == 2

            federation.points.hold("train-client-0")
            run_id = await federation.start_run()
            await until(lambda: federation.points.reached("train-client-0"))
            requeue(jobs[0], environment)
            log = shared / "demo" / "node-0" / "log"
            await until(
                lambda: (
                    state_of(jobs[0], environment) == "PENDING"
                    or log.read_text().count('"attending"') > 1  # it has started again already
                ),
                "requeued",
            )
            federation.points.release()
            await federation.finished(run_id)
            assert [each.round for each in await federation.history(run_id)] == [1, 2, 3]
            assert log.read_text().count('"attending"') > 1  # it reconnected after the requeue
            assert '"signal": "SIGTERM"' in log.read_text()  # Slurm ended it with SIGTERM first

            # A job that ends stops the roll-out: the next machine keeps its old job.
            break_setup(federation.files.folder / "federation.toml")
            said = " ".join(potluck("up", fails=True).split())
            assert "of machine node-0 failed: the job ended" in said
            assert "no such module" in said
            assert state_of(jobs[1], environment) == "RUNNING"

            assert potluck("down").count("cancelled") == 2
            await until(lambda: not any(state_of(job, environment) for job in jobs), "cancelled")
            await federation.until_attending(0)
            assert potluck("status").count("not submitted") == 2
            assert list(shared.rglob("*.pem")) == []
