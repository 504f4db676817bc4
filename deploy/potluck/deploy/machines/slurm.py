"""Hosts as jobs of a Slurm cluster: one job per machine entry, identified by the job's id."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from potluck.common.errors import ConfigurationError, RunError, StorageError, disk_error
from potluck.common.net.key_files import KEY_MODE, write_file
from potluck.deploy.machines.container_start import count_events
from potluck.deploy.machines.desired_state import PartyFiles, host_configuration, is_quiet
from potluck.deploy.machines.inventory import Inventory, MachineSettings, SlurmSettings
from potluck.deploy.machines.party_settings import HostSettings

JOB = "job.json"
LOG = "log"
SCRIPT = "hosts.sbatch"
_COMMAND_SECONDS = 60
_LOOK_SECONDS = 1.0
QUEUE_SECONDS = 15.0
"""Seconds in which a cluster with free resources starts a job; a longer wait counts as queued."""

_LAST_LINES = 5
_OVER = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "DEADLINE")

Run = Callable[[Sequence[str], Mapping[str, str]], str]
"""Function that runs a command with additional environment variables and returns its output. It
raises RunError."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The job of a machine entry. state: the state that Slurm reports, or "gone". replaces: id of
    an older job that must still be cancelled; empty if there is none."""

    machine: str
    job_id: str
    digest: str
    state: str = ""
    where: str = ""
    replaces: str = ""

    @property
    def alive(self) -> bool:
        """True while the job waits or runs."""
        return self.state not in ("", "gone") and not self.state.startswith(_OVER)


def run_command(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Run one of Slurm's commands. Raises ConfigurationError, RunError."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_COMMAND_SECONDS,
            check=False,
            env={**os.environ, **environment},
        )
    except FileNotFoundError:
        raise ConfigurationError(
            f"the program {command[0]} is not installed; run this command on a machine that "
            "submits jobs to the cluster"
        ) from None
    except subprocess.TimeoutExpired:
        raise RunError(
            f"the program {command[0]} did not answer within {_COMMAND_SECONDS} s; check that "
            "slurmctld runs (`scontrol ping`)"
        ) from None
    if done.returncode:
        said = " ".join(done.stderr.split())[:400]
        raise RunError(f"the program {command[0]} failed: {said}")
    return done.stdout.strip()


class SlurmMachine:
    """A machine entry of an inventory whose hosts run as one job."""

    def __init__(
        self, machine: MachineSettings, inventory: Inventory, run: Run = run_command
    ) -> None:
        if machine.slurm is None:
            raise ConfigurationError(f"machine {machine.name} is not a Slurm machine")
        self._machine, self._inventory, self._run = machine, inventory, run
        self._settings: SlurmSettings = machine.slurm
        self.folder = Path(self._settings.directory) / inventory.federation / machine.name

    def up(self, files: Mapping[str, PartyFiles]) -> tuple[Job, str]:
        """Submit the job, or replace it if the inventory differs.

        Return the job, and the action taken as text.
        """
        configurations = [self._write(host, files[host.name]) for host in self._machine.hosts]
        command = self._submission()
        digest = self._digest(command, files)
        before = self._only_job()
        old = before.job_id if before is not None and before.alive else ""
        if before is not None and old:
            if before.digest == digest:
                return before, "nothing to do"
            command.insert(2, f"--dependency=afterany:{old}")
        setup = "\n".join(self._settings.setup)
        with resources.as_file(resources.files("potluck.deploy.machines") / SCRIPT) as script:
            said = self._run(
                [*command, str(script), *map(str, configurations)], {"POTLUCK_SETUP": setup}
            )
        job = Job(machine=self._machine.name, job_id=said.split(";")[0], digest=digest)
        if not job.job_id.isdigit():
            raise RunError(f"sbatch printed {said[:80]!r} instead of a job id")
        job = replace(job, replaces=old)
        self._record(job)
        # after the submission: if Slurm refuses it, the old job continues
        return self._cancel_replaced(job), "submitted again" if old else "submitted"

    def _record(self, job: Job) -> None:
        record = {"job_id": job.job_id, "digest": job.digest, "replaces": job.replaces}
        self._put(self.folder / JOB, json.dumps(record).encode())

    def _cancel_replaced(self, job: Job) -> Job:
        """Cancel the job that `job` replaces, if any, and remove it from the record. If Slurm
        refuses, the next `up` or `down` tries again."""
        if not job.replaces:
            return job
        state, _ = self._state(job.replaces)
        if replace(job, state=state).alive:
            self._run(["scancel", job.replaces], {})
        job = replace(job, replaces="")
        self._record(job)
        return job

    def _only_job(self) -> Job | None:
        """Return what `look` returns, after cancelling the job that it replaces."""
        job = self.look()
        return None if job is None else self._cancel_replaced(job)

    def log_size(self) -> int:
        """Return the bytes of the job's log so far, for `await_connected`."""
        path = self.folder / LOG
        return path.stat().st_size if path.exists() else 0

    def await_connected(
        self, job: Job, seconds: float, *, since: int, queued: float = QUEUE_SECONDS
    ) -> str:
        """Wait until the hosts of a submitted job are connected. Return the job's state.

        If the job is still in the queue after `queued` seconds, waiting ends. since: the log's size
        before the submission. Raises RunError if the job ends, or its hosts don't connect within
        `seconds`.
        """
        deadline = time.monotonic() + seconds
        in_queue = time.monotonic()
        quiet = any(is_quiet(host.settings) for host in self._machine.hosts)
        while True:
            state, where = self._state(job.job_id)
            log = self._log(since)
            if replace(job, state=state).alive:
                if state != "PENDING" or "Dependency" in where:
                    in_queue = time.monotonic()
                elif time.monotonic() - in_queue >= queued:
                    return f"waits in the queue {where}"
                connected = state == "RUNNING" and (
                    quiet or count_events("attending", log) >= len(self._machine.hosts)
                )
                if connected:
                    return "connected"
                why = f"the job's hosts did not connect within {seconds:.0f} s"
            else:
                why = f"the job ended ({state.lower()})"
            if not why.startswith("the job's hosts") or time.monotonic() > deadline:
                lines = " | ".join(log.splitlines()[-_LAST_LINES:])
                raise RunError(
                    f"job {job.job_id} of machine {self._machine.name} failed: {why}; the log "
                    f"{self.folder / LOG} ends with: {lines or '(the log is empty)'}. Later "
                    "machines are unchanged: fix the cause, then run `potluck deploy slurm up`",
                    machine=self._machine.name,
                    job=job.job_id,
                )
            time.sleep(_LOOK_SECONDS)

    def _log(self, since: int) -> str:
        try:
            with (self.folder / LOG).open("rb") as log:
                log.seek(since)
                return log.read().decode(errors="replace")
        except FileNotFoundError:
            return ""

    def look(self) -> Job | None:
        """Return the submitted job with its current state; None if there is none.

        Raises ConfigurationError if the job's record is damaged.
        """
        path = self.folder / JOB
        try:
            record = json.loads(path.read_bytes())
            job_id, digest = str(record["job_id"]), str(record["digest"])
            replaces = str(record.get("replaces", ""))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageError(f"can't read {path} ({error.strerror})") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(
                f"{path} is damaged; find the job with `squeue --me`, and delete the file"
            ) from error
        state, where = self._state(job_id)
        return Job(
            machine=self._machine.name,
            job_id=job_id,
            digest=digest,
            state=state,
            where=where,
            replaces=replaces,
        )

    def down(self) -> Job | None:
        """Cancel the job by its id; delete its record, and the certificates and keys of its hosts.

        Return the job, if there was one. Raises StorageError if a file can't be deleted.
        """
        job = self._only_job()
        if job is None:
            return None
        if job.alive:
            self._run(["scancel", job.job_id], {})
        try:
            # also of hosts that the inventory no longer names
            for tls in self.folder.glob("*/tls"):
                shutil.rmtree(tls)
            (self.folder / JOB).unlink(missing_ok=True)
        except OSError as error:
            raise disk_error(error, self.folder) from error
        return job

    def _state(self, job_id: str) -> tuple[str, str]:
        if not job_id.isdigit():
            raise ConfigurationError(f"{self.folder / JOB} contains no job id")
        try:
            said = self._run(["squeue", "--noheader", "--jobs", job_id, "--format", "%T|%R"], {})
        except RunError as error:
            if "Invalid job id" in error.message:  # the job is so old that Slurm has forgotten it
                return "gone", ""
            raise
        state, _, where = said.partition("|")
        return state or "gone", where

    def _submission(self) -> list[str]:
        """Return the submission command line, up to the script."""
        name = f"potluck-{self._inventory.federation}-{self._machine.name}"
        fixed = (f"--job-name={name}", f"--output={self.folder / LOG}", "--export=ALL")
        return ["sbatch", "--parsable", *fixed, *self._settings.options]

    def _digest(self, command: Sequence[str], files: Mapping[str, PartyFiles]) -> str:
        said: list[list[str]] = [list(command), list(self._settings.setup)]
        for host in self._machine.hosts:
            said.append([host.name, self._text(host)])
            keys = sorted(files[host.name].others.items())
            said.append([name + hashlib.sha256(data).hexdigest() for name, data in keys])
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]

    def _text(self, host: HostSettings) -> str:
        folder = self.folder / host.name
        return host_configuration(
            host,
            self._inventory,
            folder=str(folder),
            state=str(folder / "state"),
            data=host.data_directory,
        )

    def _write(self, host: HostSettings, party: PartyFiles) -> Path:
        folder = self.folder / host.name
        for name, data in party.others.items():
            self._put(folder / name, data)
        for name, data in party.tls.items():
            self._put(folder / "tls" / name, data)
        path = folder / "potluck.toml"
        self._put(path, self._text(host).encode())
        return path

    def _put(self, path: Path, data: bytes) -> None:
        remedy = "`slurm.directory` must be a folder that this machine shares with the cluster"
        write_file(path, data, KEY_MODE, remedy=remedy)
