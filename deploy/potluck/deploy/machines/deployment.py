"""The commands of `potluck deploy`, carried out on each machine."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import docker
import typer
from docker.errors import DockerException
from docker.models.containers import Container
from rich.console import Console
from rich.text import Text

from potluck.common.errors import ConfigurationError, PotluckError, UnreachableError
from potluck.common.net.identity import Role
from potluck.deploy.machines import machine_images
from potluck.deploy.machines.deploy_plan import Step, StepKind, plan, roll_out_order
from potluck.deploy.machines.desired_state import (
    PARTY_LABEL,
    DesiredContainer,
    PartyFiles,
    desired_on,
)
from potluck.deploy.machines.docker_engine import connected, containers_of, open_engine
from potluck.deploy.machines.inventory import Inventory, MachineSettings
from potluck.deploy.machines.machine_work import MachineWork
from potluck.deploy.machines.party_files import issue_missing, missing, parties_on, read_files
from potluck.deploy.machines.side_by_side import Say, attempt, failures, side_by_side

# Commands -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ContainerStatus:
    """A container, as `status` shows it. pending: the step that `up` would take; empty if none."""

    machine: str
    party: str
    state: str
    restarts: int
    exit_code: int
    started: str
    pending: str
    last_line: str = ""


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """An inventory with all data that the commands need for its machines.

    files: each party's files. images: fingerprints of the images that are streamed. to_issue:
    parties that have no certificate yet.
    """

    inventory: Inventory
    files: Mapping[str, PartyFiles]
    images: Mapping[str, str] = field(default_factory=dict)
    to_issue: tuple[str, ...] = ()

    @classmethod
    def prepared(
        cls, inventory: Inventory, machines: Sequence[MachineSettings], *, issue: bool
    ) -> Deployment:
        """Read all needed files on this machine, before any other machine is changed.

        issue: issue missing certificates; otherwise only list their parties. Raises PotluckError.
        """
        parties = parties_on(machines, inventory)
        if issue:
            issue_missing(parties, inventory)
        lacking = {party.name for party in missing(parties, inventory.pki)}
        files = {
            party.name: PartyFiles(tls={})
            if party.name in lacking
            else read_files(party, inventory)
            for party in parties
        }
        desired = [one for m in machines for one in desired_on(m, inventory, files)]
        with _source(inventory) as source:
            images = {
                name: machine_images.fingerprint(machine_images.local_image(source, name))
                for name in {one.image for one in desired}
                if source is not None
            }
        return cls(inventory=inventory, files=files, images=images, to_issue=tuple(sorted(lacking)))

    def desired(self, machine: MachineSettings) -> dict[str, DesiredContainer]:
        """Return the desired containers of a machine, by name."""
        return {one.name: one for one in desired_on(machine, self.inventory, self.files)}

    def plan(self, machine: MachineSettings, say: Say) -> list[Step]:
        """Return the steps that `up` would take on a machine."""
        say("looking")
        with self._working(machine, say) as work:
            return self._plan(work)

    def put_images(self, machine: MachineSettings, say: Say) -> list[Step]:
        """Put the missing images on a machine. Return all steps that `up` takes there."""
        say("looking")
        with self._working(machine, say) as work:
            steps = self._plan(work)
            work.put_images(steps)
            return steps

    def carry_out(self, step: Step, machine: MachineSettings, say: Say) -> Step:
        """Carry out the step of one container. Return the step when the container is connected."""
        one = None if step.kind is StepKind.REMOVE else self.desired(machine)[step.subject]
        with self._working(machine, say) as work:
            work.carry_out(step, one, self.inventory.connect_seconds)
            return step

    def roles(self, machines: Sequence[MachineSettings]) -> dict[str, Role]:
        """Return the role of each desired container of these machines."""
        return {one.name: one.role for m in machines for one in self.desired(m).values()}

    def status(self, machine: MachineSettings, say: Say) -> list[ContainerStatus]:
        """Return the state of each container of a machine."""
        say("looking")
        with self._working(machine, say) as work:
            pending = {step.subject: str(step) for step in self._plan(work)}
            found = {str(container.name): container for container in work.containers()}
            desired = self.desired(machine)
            lines: list[ContainerStatus] = []
            for name in [*desired, *sorted(found.keys() - desired.keys())]:
                container = found.get(name)
                state = container.attrs["State"] if container is not None else {}
                running = bool(state.get("Running")) and not state.get("Restarting")
                said = "" if container is None or running else _last_line(container.logs(tail=1))
                lines.append(
                    ContainerStatus(
                        machine=machine.name,
                        party=desired[name].party if name in desired else name,
                        state="missing" if container is None else container.status,
                        restarts=container.attrs.get("RestartCount", 0) if container else 0,
                        exit_code=int(state.get("ExitCode", 0)),
                        started=str(state.get("StartedAt", ""))[:19],
                        pending=pending.get(name, ""),
                        last_line=said,
                    )
                )
            return lines

    def restart(self, machine: MachineSettings, parties: Sequence[str], say: Say) -> list[str]:
        """Restart the containers of these parties, or of all. Return the containers' names."""
        done: list[str] = []
        with self._working(machine, say) as work:
            for name, one in self.desired(machine).items():
                container = {str(c.name): c for c in work.containers()}.get(name)
                if container is not None and (not parties or one.party in parties):
                    say(f"restarting {name}")
                    container.restart()
                    done.append(name)
        return done

    def _plan(self, work: MachineWork) -> list[Step]:
        desired = list(self.desired(work.machine).values())
        work.check_engine(desired)
        return plan(desired, work.observe(desired), self.images)

    @contextlib.contextmanager
    def _working(self, machine: MachineSettings, say: Say) -> Iterator[MachineWork]:
        with connected(machine) as client, _source(self.inventory) as source:
            yield MachineWork(
                machine=machine,
                federation=self.inventory.federation,
                client=client,
                source=source,
                say=say,
            )


def take_down(
    machine: MachineSettings, inventory: Inventory, say: Say, *, keep_state: bool
) -> list[str]:
    """Remove from a machine all that this federation made. Return the removed names."""
    with connected(machine) as client:
        work = MachineWork(
            machine=machine, federation=inventory.federation, client=client, source=None, say=say
        )
        return work.remove_all(keep_state=keep_state)


@contextlib.contextmanager
def _source(inventory: Inventory) -> Iterator[docker.DockerClient | None]:
    """Yield this machine's engine, which streams images; None if a registry provides them."""
    settings = inventory.image
    if settings.source == "registry":
        yield None
        return
    try:
        client = open_engine(settings.engine)
    except (DockerException, OSError) as error:
        raise ConfigurationError(
            f"the engine at {settings.engine}, from which images are streamed, does not answer "
            f"({' '.join(str(error).split())[:200]}); start the engine, or set image.source = "
            '"registry"'
        ) from error
    try:
        yield client
    finally:
        client.close()


def _last_line(log: bytes) -> str:
    lines = log.decode(errors="replace").splitlines()
    return lines[-1].strip()[:400] if lines else ""


# Roll-out -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RollOut:
    """The outcome of `up`.

    results: steps taken, or the error, by machine. left: steps that were skipped because an earlier
    step failed, each with its machine.
    """

    results: dict[str, list[Step] | PotluckError]
    left: list[tuple[str, Step]] = field(default_factory=list)


def roll_out(
    deployment: Deployment, machines: Sequence[MachineSettings], console: Console
) -> RollOut:
    """Change the machines to match the inventory.

    If a machine can't be reached, the roll-out continues on the other machines. If a container does
    not connect, the roll-out stops, and later containers are not changed.
    """
    planned = side_by_side(machines, deployment.put_images, console)
    plans = {name: each for name, each in planned.items() if not isinstance(each, PotluckError)}
    taken = {
        name: [step for step in steps if step.kind is StepKind.PUT_IMAGE]
        for name, steps in plans.items()
    }
    failed = failures(planned)
    found = {machine.name: machine for machine in machines}
    left: list[tuple[str, Step]] = []
    stopped = False
    for name, step in roll_out_order(plans, deployment.roles(machines)):
        if stopped or name in failed:
            left.append((name, step))
            continue
        say = partial(_say, console, name)
        done = attempt(partial(deployment.carry_out, step), found[name], say)
        if isinstance(done, PotluckError):
            failed[name] = done
            stopped = not isinstance(done, UnreachableError)
            say(f"failed: {done.message}")
        else:
            taken[name].append(done)
    results = {name: failed.get(name) or taken[name] for name in planned}
    return RollOut(results, left)


def _say(console: Console, machine: str, text: str) -> None:
    console.print(Text(f"{machine}: {text}"), soft_wrap=True)


# Logs ---------------------------------------------------------------------------------------------

_OUTPUT = threading.Lock()


def follow_logs(
    machine: MachineSettings,
    say: Say,
    *,
    inventory: Inventory,
    parties: Sequence[str],
    tail: int,
    follow: bool,
) -> int:
    """Print the last log lines of a machine's containers. Return the number of containers.

    follow: also print new lines until the containers end.
    """
    say("reading")
    with connected(machine) as client:
        chosen = [
            container
            for container in containers_of(client, inventory.federation)
            if not parties or container.labels.get(PARTY_LABEL) in parties
        ]
        with ThreadPoolExecutor(max(1, len(chosen))) as pool:
            list(pool.map(lambda each: _print(each, tail=tail, follow=follow), chosen))
        return len(chosen)


def _print(container: Container, *, tail: int, follow: bool) -> None:
    party = container.labels.get(PARTY_LABEL, str(container.name))
    rest = b""
    for chunk in container.logs(stream=True, follow=follow, tail=tail):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            _write(party, line)
    if rest:
        _write(party, rest)


def _write(party: str, line: bytes) -> None:
    # The line comes from another machine: it must not contain control sequences for this terminal.
    text = "".join(
        c if c.isprintable() or c == "\t" else "�" for c in line.decode(errors="replace")
    )
    with _OUTPUT:
        typer.echo(f"{party}  {text}")
