"""The roll-out of `potluck deploy up`: images in parallel, then one container after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from rich.console import Console
from rich.text import Text

from potluck.common.errors import PotluckError, UnreachableError
from potluck.deploy.machines.deploy_plan import Step, StepKind, roll_out_order
from potluck.deploy.machines.deployment import Deployment
from potluck.deploy.machines.inventory import MachineSettings
from potluck.deploy.machines.side_by_side import attempt, failures, side_by_side


@dataclass(frozen=True)
class RollOut:
    """The outcome of `up`.

    results: by machine, the steps taken, or the error. left: steps that were skipped because an
    earlier step failed, each with its machine.
    """

    results: dict[str, list[Step] | PotluckError]
    left: list[tuple[str, Step]] = field(default_factory=list)


def roll_out(
    deployment: Deployment, machines: Sequence[MachineSettings], console: Console
) -> RollOut:
    """Change the machines to match the inventory.

    If a machine can't be reached, the others continue. If a container does not connect, the
    roll-out stops, and later containers are not changed.
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
