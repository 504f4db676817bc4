"""Relays between the hosts and the coordinator of a test's federation: real processes."""

from __future__ import annotations

import contextlib
import json
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomlkit
from support.federation import Federation, set_values, until

from potluck.common.net.identity import Role
from potluck.deploy.local.demo_files import LOOPBACK, program, reserved_port
from potluck.deploy.local.local_federation import kill
from potluck.deploy.local.processes import LocalProcess, TetheredProcess, stop_all
from potluck.deploy.pki import authority as pki


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
        """Its state directory."""
        return self.folder / self.name

    @property
    def log(self) -> Path:
        """Its log, of the process started last."""
        return self.folder / f"{self.name}.log"

    async def start(self) -> None:
        """Start it, and wait until it listens."""
        command = [program("potluck-relay"), "--config", str(self.config), "--log-format", "json"]
        self.process = await TetheredProcess.start(self.name, command, log=self.log)
        self.processes.append(self.process)
        await until(lambda: "listening" in self.events(), f"{self.name} listens")

    async def kill(self) -> None:
        """SIGKILL."""
        assert self.process is not None
        await kill(self.process)

    def events(self) -> list[str]:
        """What its log tells."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [json.loads(line)["event"] for line in lines if line.startswith("{")]

    def held(self) -> list[Path]:
        """Updates that it holds whole."""
        return sorted((self.state / "updates").glob("*.json"))

    def metric(self, name: str, **labels: str) -> float:
        """The value of one of its metrics; 0 for a series that is not there."""
        with urllib.request.urlopen(f"http://{self.metrics}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        told = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
        series = f"{name}{{{told}}}" if told else name
        return next(
            (float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{series} ")), 0.0
        )


@contextlib.asynccontextmanager
async def relays_of(
    federation: Federation,
    behind: Mapping[str, Sequence[int]],
    *,
    claims: Mapping[str, Sequence[str]] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> AsyncIterator[dict[str, Relay]]:
    """Relays by name, under way, with the numbers of the hosts behind each, whose files now name
    it. `claims`: of their certificates where they are not those of the hosts."""
    folder = federation.files.folder
    made: dict[str, Relay] = {}
    before = {number: federation.files.hosts[number].read_text() for number in _all(behind)}
    with contextlib.ExitStack() as ports:
        for name, numbers in behind.items():
            address = f"{LOOPBACK}:{ports.enter_context(reserved_port())}"
            metrics = f"{LOOPBACK}:{ports.enter_context(reserved_port())}"
            held = [clients_of(federation.files.hosts[number]) for number in numbers]
            mine = (claims or {}).get(name) or [each for one in held for each in one]
            issued = pki.issue(folder / "pki", Role.RELAY, name, clients=mine, hosts=[LOOPBACK])
            config = folder / f"{name}.toml"
            values = {
                "coordinator": federation.files.operator.coordinator,
                "listen": address,
                "state_directory": name,
                "metrics_address": metrics,
                "reconnect_maximum_seconds": 0.3,
                **(settings or {}),
                "tls": {
                    "certificate": str(issued.certificate),
                    "key": str(issued.key),
                    "authority": str(issued.authority),
                },
            }
            config.write_text(tomlkit.dumps(values))
            made[name] = Relay(
                name=name, folder=folder, config=config, address=address, metrics=metrics
            )
            for number in numbers:
                set_values(federation.files.hosts[number], {"coordinator": address})
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


def clients_of(config: Path) -> list[str]:
    """The clients in a host's configuration, as it names them."""
    return [str(each) for each in tomlkit.parse(config.read_text())["clients"]]
