"""A federation of real processes whose clients disclose profiles."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomlkit
from support.federation import Federation, Points, set_values
from support.shared_forks import shared_forks

from potluck.deploy.local.demo_files import DemoOptions, reserved_port, write_demo_files
from potluck.deploy.local.local_federation import LocalFederation


@contextlib.asynccontextmanager
async def profile_federation(
    folder: Path,
    *,
    task: str = "digits",
    selector: str = "fedentopt",
    clients: int = 4,
    count: int = 2,
    rounds: int = 2,
    assignments: Sequence[str] = (),
    disclosure: Mapping[str, Any] | None = None,
    coordinator: Mapping[str, Any] | None = None,
    start_hosts: bool = True,
) -> AsyncIterator[Federation]:
    """Run a coordinator and two hosts. disclosure: the [disclosure] table of both hosts."""
    options = DemoOptions(
        task=task,
        selector=selector,
        strategy="fedavg",
        clients=clients,
        hosts=2,
        count=count,
        rounds=rounds,
        seed=7,
        device="cpu",
        assignments=["training.steps=2", *assignments],
    )
    with reserved_port() as port:
        files = write_demo_files(folder / "federation", options, port)
        set_values(files.coordinator, {"heartbeat_seconds": 0.2, **(coordinator or {})})
        for path in files.hosts:
            set_values(path, {"reconnect_maximum_seconds": 0.3})
            if disclosure:
                set_values(path, {"disclosure": tomlkit.item(dict(disclosure))})
        async with (
            LocalFederation(files, shared_forks()) as processes,
            processes.operator() as operator,
        ):
            federation = Federation(
                files=files,
                processes=processes,
                operator=operator,
                points=Points(folder),
                options=options,
            )
            await processes.start_coordinator()
            if start_hosts:
                await federation.start_hosts()
            await processes.until_ready()
            yield federation


def ledgers(federation: Federation) -> dict[str, dict[str, Any]]:
    """Return each client's disclosure ledger, by client."""
    paths = federation.files.folder.glob("host-*/disclosures/*.json")
    return {path.stem: json.loads(path.read_text()) for path in paths}
