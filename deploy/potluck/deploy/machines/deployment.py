"""The commands of `potluck deploy`, carried out on each machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import docker
from docker.errors import DockerException

from potluck.common.errors import ConfigurationError
from potluck.common.net.identity import Role
from potluck.deploy.machines import machine_images
from potluck.deploy.machines.deploy_plan import Step, StepKind, plan
from potluck.deploy.machines.desired_state import DesiredContainer, PartyFiles, desired_on
from potluck.deploy.machines.docker_engine import connected, open_engine
from potluck.deploy.machines.inventory import Inventory, MachineSettings
from potluck.deploy.machines.machine_work import MachineWork
from potluck.deploy.machines.party_files import issue_missing, missing, parties_on, read_files
from potluck.deploy.machines.side_by_side import Say


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

    files: by party. images: fingerprints of the images that are streamed. to_issue: parties that
    have no certificate yet.
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
        """Carry out the step of one container. Return the step once the container is connected."""
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
        """Restart the containers of these parties, or of all. Returns their names."""
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
    """Connect to this machine's engine, which streams images; None if a registry provides them."""
    settings = inventory.image
    if settings.source == "registry":
        yield None
        return
    try:
        client = open_engine(settings.engine)
    except (DockerException, OSError) as error:
        raise ConfigurationError(
            f"images are to be streamed from the engine at {settings.engine}, but none answers "
            f"there ({' '.join(str(error).split())[:200]}); start it, or set image.source = "
            '"registry"'
        ) from error
    try:
        yield client
    finally:
        client.close()


def _last_line(log: bytes) -> str:
    lines = log.decode(errors="replace").splitlines()
    return lines[-1].strip()[:400] if lines else ""
