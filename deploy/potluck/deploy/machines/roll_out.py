"""The roll-out of `potluck deploy up`: images side by side, then one container after another."""

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

    results: by machine, the steps taken, or why it failed. left: steps that were not taken since
    one before them failed, with their machines.
    """

    results: dict[str, list[Step] | PotluckError]
    left: list[tuple[str, Step]] = field(default_factory=list)


def roll_out(
    deployment: Deployment, machines: Sequence[MachineSettings], console: Console
) -> RollOut:
    """Bring machines to what the inventory asks for.

    A machine that can't be reached stops no other. A container that does not connect stops the
    roll-out, and those after it stay as they are.
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
