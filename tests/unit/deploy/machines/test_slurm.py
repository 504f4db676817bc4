"""The Slurm commands that are called, tested without a cluster; `test_deploy_slurm.py` uses a real
one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from potluck.client.config import load_config
from potluck.common.errors import ConfigurationError, RunError
from potluck.common.settings.configuration import validate
from potluck.deploy.machines.desired_state import PartyFiles
from potluck.deploy.machines.inventory import Inventory
from potluck.deploy.machines.slurm import JOB, SlurmMachine, run_command

FILES = {"lab-a": PartyFiles(tls={"certificate.pem": b"c", "key.pem": b"k"})}


@dataclass
class Cluster:
    """Fake of Slurm's commands, with Slurm's answers."""

    state: str = "RUNNING"
    said: list[list[str]] = field(default_factory=list)

    def __call__(self, command: Sequence[str], environment: Mapping[str, str]) -> str:
        self.said.append(list(command))
        if command[0] == "sbatch":
            assert environment["POTLUCK_SETUP"] == "module load cuda"
            return f"{41 + sum(each[0] == 'sbatch' for each in self.said)};cluster"
        if command[0] == "squeue":
            if not self.state:
                raise RunError("squeue refused: slurm_load_jobs error: Invalid job id specified")
            return f"{self.state}|node-1"
        return ""


def inventory(folder: Path, **host: object) -> Inventory:
    slurm = {
        "directory": str(folder),
        "options": ["--partition=gpu"],
        "setup": ["module load cuda"],
    }
    hosts = [{"name": "lab-a", "clients": ["client-0:5"], "device": "cuda:0"} | host]
    machine = {"name": "cluster", "engine": "slurm", "slurm": slurm, "hosts": hosts}
    values = {"federation": "demo", "address": "lab:7443", "machines": [machine]}
    return validate(Inventory, values, source="federation.toml")


def entry(folder: Path, cluster: Cluster, **host: object) -> SlurmMachine:
    found = inventory(folder, **host)
    return SlurmMachine(found.machines[0], found, cluster)


def test_slurm_job_is_submitted_once_and_found_by_its_id(tmp_path: Path) -> None:
    cluster = Cluster()
    job, done = entry(tmp_path, cluster).up(FILES)
    assert (job.job_id, done) == ("42", "submitted")
    [submitted] = cluster.said
    assert submitted[:3] == ["sbatch", "--parsable", "--job-name=potluck-demo-cluster"]
    assert submitted[-3] == "--partition=gpu"
    assert Path(submitted[-2]).name == "hosts.sbatch"
    assert load_config(Path(submitted[-1]), {}).device == "cuda:0"
    modes = {path.stat().st_mode & 0o777 for path in tmp_path.rglob("*.*") if path.is_file()}
    assert modes == {0o600}
    assert entry(tmp_path, cluster).up(FILES)[1] == "nothing to do"
    assert entry(tmp_path, cluster).up(FILES)[0].job_id == "42"


def test_slurm_hosts_get_member_files_if_the_federation_has_a_root(tmp_path: Path) -> None:
    cluster = Cluster()
    found = inventory(tmp_path).model_copy(update={"federation_root": Path("root")})
    members = {"members.json": b"m", "members/client-0.key": b"k"}
    tls = {**FILES["lab-a"].tls, **members}
    files = {"lab-a": PartyFiles(tls=tls, others={"root.pub": b"p"})}
    SlurmMachine(found.machines[0], found, cluster).up(files)
    [submitted] = cluster.said
    config = load_config(Path(submitted[-1]), {})
    for path, content in (
        (config.federation_root, b"p"),
        (config.members, b"m"),
        (config.member_key, None),
    ):
        assert path is not None
        assert content is None or path.read_bytes() == content
    assert config.member_key is not None
    assert (config.member_key / "client-0.key").read_bytes() == b"k"


def test_changed_slurm_job_is_replaced_and_an_ended_one_submitted_again(
    tmp_path: Path,
) -> None:
    cluster = Cluster()
    entry(tmp_path, cluster).up(FILES)
    job, done = entry(tmp_path, cluster, device="cuda:1").up(FILES)
    assert (job.job_id, done) == ("43", "submitted again")
    submitted, _, cancelled = cluster.said[-3:]
    assert "--dependency=afterany:42" in submitted
    assert cancelled == ["scancel", "42"]
    for state in ("COMPLETED", "CANCELLED by 0", ""):
        cluster.state = state
        assert entry(tmp_path, cluster, device="cuda:1").up(FILES)[1] == "submitted"


def test_refused_slurm_submission_keeps_the_previous_job(tmp_path: Path) -> None:
    cluster = Cluster()
    entry(tmp_path, cluster).up(FILES)

    def refuse(command: Sequence[str], environment: Mapping[str, str]) -> str:
        if command[0] == "sbatch":
            raise RunError("sbatch refused: invalid partition")
        return cluster(command, environment)

    found = inventory(tmp_path, device="cuda:1")
    with pytest.raises(RunError, match="invalid partition"):
        SlurmMachine(found.machines[0], found, refuse).up(FILES)
    assert not [said for said in cluster.said if said[0] == "scancel"]
    job = entry(tmp_path, cluster).look()
    assert job is not None
    assert job.job_id == "42"


@pytest.mark.parametrize("then", ["up", "down"])
def test_slurm_job_that_could_not_be_cancelled_is_cancelled_next_time(
    tmp_path: Path, then: str
) -> None:
    cluster = Cluster()
    entry(tmp_path, cluster).up(FILES)

    def refuse(command: Sequence[str], environment: Mapping[str, str]) -> str:
        if command[0] == "scancel":
            raise RunError("the program scancel did not answer within 60 s")
        return cluster(command, environment)

    found = inventory(tmp_path, device="cuda:1")
    with pytest.raises(RunError, match="scancel did not answer"):
        SlurmMachine(found.machines[0], found, refuse).up(FILES)
    machine = entry(tmp_path, cluster, device="cuda:1")
    if then == "up":
        assert machine.up(FILES)[1] == "nothing to do"
        assert machine.up(FILES)[0].job_id == "43"
        expected = ["42"]
    else:
        machine.down()
        expected = ["42", "43"]
    assert [said[1] for said in cluster.said if said[0] == "scancel"] == expected


def test_slurm_job_is_awaited_until_its_hosts_are_connected(tmp_path: Path) -> None:
    cluster = Cluster()
    machine = entry(tmp_path, cluster)
    job, _ = machine.up(FILES)
    log = machine.folder / "log"
    log.write_text('{"event": "attending"}\n')
    since = machine.log_size()
    log.write_text(log.read_text() + "no\n")
    with pytest.raises(
        RunError, match=r"hosts did not connect within 0 s; the log .* ends with: no[.]"
    ):
        machine.await_connected(job, 0, since=since)
    log.write_text(log.read_text() + '{"event": "attending"}\n')
    assert machine.await_connected(job, 0, since=since) == "connected"
    for state in ("FAILED", ""):
        cluster.state = state
        with pytest.raises(RunError, match=r"job 42 of machine cluster failed: the job ended"):
            machine.await_connected(job, 300, since=since)
    cluster.state = "PENDING"
    waits = machine.await_connected(job, 300, since=since, queued=0)
    assert waits == "waits in the queue node-1"


def test_down_cancels_the_slurm_job_by_id_and_deletes_the_keys(tmp_path: Path) -> None:
    cluster = Cluster()
    keys = {"members/client-0.key": b"k", "members/next/client-0.key": b"k"}
    tls = {**FILES["lab-a"].tls, **keys}
    entry(tmp_path, cluster).up({"lab-a": PartyFiles(tls=tls)})
    job = entry(tmp_path, cluster).down()
    assert job is not None
    assert cluster.said[-1] == ["scancel", "42"]
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["potluck.toml"]
    assert entry(tmp_path, cluster).down() is None


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=60) | st.sampled_from([b"{}", b"[]", b'{"job_id": 1}', b"1"]))
def test_damaged_slurm_job_record_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    machine = entry(tmp_path, Cluster())
    machine.folder.mkdir(parents=True, exist_ok=True)
    (machine.folder / JOB).write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"job\.json"):
        machine.look()


def test_missing_slurm_command_is_named_in_the_error() -> None:
    with pytest.raises(
        ConfigurationError, match="sbatch-of-nowhere is not installed; run this command on"
    ):
        run_command(["sbatch-of-nowhere"], {})


@pytest.mark.parametrize("option", ["gpu", "", "; rm -rf /"])
def test_invalid_slurm_option_is_refused(tmp_path: Path, option: str) -> None:
    slurm = {"directory": str(tmp_path), "options": [option]}
    machine = {"name": "cluster", "engine": "slurm", "slurm": slurm}
    values = {"federation": "demo", "address": "lab:7443", "machines": [machine]}
    with pytest.raises(ConfigurationError, match="is not an option"):
        validate(Inventory, values, source="federation.toml")
