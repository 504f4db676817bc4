"""Relays between the hosts and the coordinator of a test's federation: real processes."""

from __future__ import annotations

import contextlib
import json
import sys
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from support.federation import PLUGINS, until

from potluck.deploy.local.demo_files import LOOPBACK, DemoFiles, reserved_port
from potluck.deploy.local.local_federation import kill
from potluck.deploy.local.processes import LocalProcess, TetheredProcess, stop_all
from potluck.deploy.local.relay_files import write_relay

PROGRAM = PLUGINS / "potluck-relay"


class Federated(Protocol):
    """A federation with known files."""

    @property
    def files(self) -> DemoFiles:
        """The federation's files."""
        ...


@dataclass(kw_only=True)
class Relay:
    """A relay's files, and its process that was started last."""

    name: str
    folder: Path
    config: Path
    address: str
    metrics: str
    process: LocalProcess | None = None
    processes: list[LocalProcess] = field(default_factory=list)

    @property
    def state(self) -> Path:
        """The relay's state directory."""
        return self.folder / self.name

    @property
    def log(self) -> Path:
        """The log of the relay's newest process."""
        return self.folder / f"{self.name}.log"

    async def start(self) -> None:
        """Start the relay, and wait until it listens."""
        options = ["--config", str(self.config), "--log-format", "json"]
        command = [sys.executable, str(PROGRAM), *options]
        self.process = await TetheredProcess.start(self.name, command, log=self.log)
        self.processes.append(self.process)
        await until(lambda: "listening" in self.events(), f"{self.name} listens")

    async def kill(self) -> None:
        """End the relay by SIGKILL, as a crash would."""
        assert self.process is not None
        await kill(self.process)

    def events(self) -> list[str]:
        """Return the events in the relay's log."""
        text = self.log.read_text() if self.log.exists() else ""
        *lines, _ = text.split("\n")  # the last line may be incomplete
        return [json.loads(line)["event"] for line in lines if line.startswith("{")]

    def held(self) -> list[Path]:
        """Return the files of completely received updates."""
        return sorted((self.state / "updates").glob("*.json"))

    def metric(self, name: str, **labels: str) -> float:
        """Return the value of one of the relay's metrics; 0 if the series does not exist."""
        with urllib.request.urlopen(f"http://{self.metrics}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        told = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
        series = f"{name}{{{told}}}" if told else name
        return next(
            (float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{series} ")), 0.0
        )


@contextlib.asynccontextmanager
async def relays_of(
    federation: Federated,
    behind: Mapping[str, Sequence[int]],
    *,
    claims: Mapping[str, Sequence[str]] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> AsyncIterator[dict[str, Relay]]:
    """Start relays; yield them by name. `behind`: numbers of the hosts that connect through each
    relay. `claims`: clients in a relay's certificate; by default those of its hosts."""
    made: dict[str, Relay] = {}
    before = {number: federation.files.hosts[number].read_text() for number in _all(behind)}
    with contextlib.ExitStack() as ports:
        for name, numbers in behind.items():
            metrics = f"{LOOPBACK}:{ports.enter_context(reserved_port())}"
            files = write_relay(
                federation.files,
                name,
                numbers,
                ports.enter_context(reserved_port()),
                clients=(claims or {}).get(name),
                settings={
                    "metrics_address": metrics,
                    "reconnect_maximum_seconds": 0.3,
                    **(settings or {}),
                },
            )
            made[name] = Relay(
                name=name,
                folder=federation.files.folder,
                config=files.config,
                address=files.address,
                metrics=metrics,
            )
        try:
            for relay in made.values():
                await relay.start()
            yield made
        finally:
            await stop_all([each for relay in made.values() for each in relay.processes])
            for number, text in before.items():
                federation.files.hosts[number].write_text(text)


def _all(behind: Mapping[str, Sequence[int]]) -> list[int]:
    return [number for numbers in behind.values() for number in numbers]
