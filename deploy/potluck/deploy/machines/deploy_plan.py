"""The steps from a machine's observed state to its desired state. Pure: no engine is called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from potluck.common.net.identity import Role
from potluck.deploy.machines.desired_state import DesiredContainer


class StepKind(StrEnum):
    """Kinds of changes to a machine's images and containers."""

    PUT_IMAGE = "put image"
    CREATE = "create"
    REPLACE = "replace"
    RECONFIGURE = "reconfigure"
    REFRESH = "refresh certificates"
    START = "start"
    REMOVE = "remove"


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One step of a plan. subject: an image, or a container's name. why: the reason, for people."""

    kind: StepKind
    subject: str
    why: str

    def __str__(self) -> str:
        return f"{self.kind} {self.subject}: {self.why}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservedContainer:
    """Observed state of a container of this federation. A digest is empty if it is unknown."""

    name: str
    party: str
    digest: str
    image: str
    running: bool
    state: str
    configuration_digest: str = ""
    tls_digest: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """Observed state of a machine. images: fingerprints of the required images that the machine
    has.
    """

    containers: Mapping[str, ObservedContainer]
    images: Mapping[str, str]


def plan(
    desired: Sequence[DesiredContainer], observed: Observed, images: Mapping[str, str]
) -> list[Step]:
    """Return the steps for one machine, in order; none if it matches the desired state.

    images: required fingerprint by image. Of images that are not listed, a machine may have any
    version.
    """
    steps: list[Step] = []
    for image in dict.fromkeys(one.image for one in desired):
        wanted, found = images.get(image), observed.images.get(image)
        if found is None:
            steps.append(
                Step(kind=StepKind.PUT_IMAGE, subject=image, why="the machine lacks this image")
            )
        elif wanted is not None and wanted != found:
            steps.append(
                Step(
                    kind=StepKind.PUT_IMAGE,
                    subject=image,
                    why="the machine has another image with this name",
                )
            )
    for one in desired:
        step = _step_for(one, observed, images.get(one.image) or observed.images.get(one.image))
        steps += [] if step is None else [step]
    names = {name for one in desired for name in (one.name, one.before)}
    steps += [
        Step(kind=StepKind.REMOVE, subject=name, why="the inventory no longer names this container")
        for name in sorted(observed.containers)
        if name not in names
    ]
    return steps


_IN_TURN = (Role.COORDINATOR, Role.RELAY, Role.HOST)


def roll_out_order(
    plans: Mapping[str, Sequence[Step]], roles: Mapping[str, Role]
) -> list[tuple[str, Step]]:
    """Return the steps for the containers of all machines in order, each with its machine.

    Removals come first, since a host that moves to another machine can't be connected twice. Then
    come the coordinator, the relays and the hosts, since each kind needs the kinds before it.
    plans: steps by machine. roles: roles by container.
    """

    def turn(each: tuple[str, Step]) -> int:
        role = roles.get(each[1].subject)
        return -1 if role is None or each[1].kind is StepKind.REMOVE else _IN_TURN.index(role)

    steps = [(machine, step) for machine, plan in plans.items() for step in plan]
    return sorted((each for each in steps if each[1].kind is not StepKind.PUT_IMAGE), key=turn)


def _step_for(one: DesiredContainer, observed: Observed, image: str | None) -> Step | None:
    found = observed.containers.get(one.name)

    def step(kind: StepKind, why: str) -> Step:
        return Step(kind=kind, subject=one.name, why=why)

    if one.before in observed.containers:
        return step(StepKind.REPLACE, "an earlier replacement was not finished")
    if found is None:
        return step(StepKind.CREATE, "the machine lacks this container")
    if found.digest != one.digest:
        return step(StepKind.REPLACE, "the inventory has other options")
    if image is None or found.image != image:
        return step(StepKind.REPLACE, "the container runs another image")
    if found.configuration_digest != one.configuration_digest:
        return step(
            StepKind.RECONFIGURE, "the container's configuration differs from the inventory"
        )
    if found.tls_digest != one.tls_digest:
        return step(StepKind.REFRESH, "the container's certificates differ from the inventory")
    if not found.running:
        return step(StepKind.START, f"the container is {found.state}")
    return None
