"""A Slurm cluster of one node on this machine: munged, slurmctld and slurmd in a folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

START_SECONDS = 120.0
_LOOK_SECONDS = 0.1
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "scontrol")


def require_slurm() -> None:
    """Skip the test with a reason if Slurm is missing."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    missing = [name for name in _PROGRAMS if shutil.which(name, path=path) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)} (Debian: slurmctld slurmd munge)")
    if os.geteuid() != 0:
        pytest.skip("only root can start slurmd")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def _configuration(folder: Path) -> str:
    name = socket.gethostname().split(".")[0]
    return f"""
ClusterName=potluck
SlurmctldHost={name}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder / "munge.socket"},cred_expire=5
CryptoType=crypto/munge
SlurmctldPort={_free_port()}
SlurmdPort={_free_port()}
StateSaveLocation={folder / "state"}
SlurmdSpoolDir={folder / "spool"}
SlurmctldPidFile={folder / "slurmctld.pid"}
SlurmdPidFile={folder / "slurmd.pid"}
SlurmctldLogFile={folder / "slurmctld.log"}
SlurmdLogFile={folder / "slurmd.log"}
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SchedulerType=sched/builtin
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
KillWait=20
NodeName={name} NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=all Nodes={name} Default=YES MaxTime=INFINITE State=UP
"""


@contextlib.contextmanager
def cluster() -> Iterator[dict[str, str]]:
    """Run a cluster; once its node is idle, yield the environment in which Slurm's commands find
    it."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/var/tmp"))
    folder.chmod(0o755)
    (folder / "state").mkdir()
    (folder / "spool").mkdir()
    (folder / "slurm.conf").write_text(_configuration(folder))
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    munged = ["/usr/sbin/munged", "--foreground", "--force", "--num-threads=2"]
    munged += [f"--key-file={key}", f"--socket={folder / 'munge.socket'}"]
    munged += [f"--pid-file={folder / 'munge.pid'}", f"--log-file={folder / 'munge.log'}"]
    munged += [f"--seed-file={folder / 'munge.seed'}"]
    daemons = (munged, ["/usr/sbin/slurmctld", "-D", "-c"], ["/usr/sbin/slurmd", "-D", "-c"])
    running: list[subprocess.Popen[bytes]] = []
    try:
        for command in daemons:
            with (folder / f"{Path(command[0]).name}.out").open("wb") as log:
                running.append(
                    subprocess.Popen(
                        command,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )
            if command is munged:
                _until((folder / "munge.socket").exists, running, folder)
        _until(lambda: _idle(environment), running, folder)
        yield environment
    finally:
        for process in reversed(running):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)
        for process in reversed(running):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _idle(environment: dict[str, str]) -> bool:
    said = subprocess.run(
        ["sinfo", "--noheader", "--format", "%T"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return said.stdout.strip() == "idle"


def _until(condition: object, running: list[subprocess.Popen[bytes]], folder: Path) -> None:
    assert callable(condition)
    deadline = time.monotonic() + START_SECONDS
    while not condition():
        said = "".join(path.read_text()[-1500:] for path in folder.glob("*.log"))
        said += "".join(path.read_text()[-1500:] for path in folder.glob("*.out"))
        assert all(process.poll() is None for process in running), said
        assert time.monotonic() < deadline, said
        time.sleep(_LOOK_SECONDS)
