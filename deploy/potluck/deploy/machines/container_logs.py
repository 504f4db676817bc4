"""Logs of containers on many machines at once."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import typer
from docker.models.containers import Container

from potluck.deploy.machines.desired_state import PARTY_LABEL
from potluck.deploy.machines.docker_engine import connected, containers_of
from potluck.deploy.machines.inventory import Inventory, MachineSettings
from potluck.deploy.machines.side_by_side import Say

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
