"""The processes of a federation on this machine, started when a run needs them.

The first run determines the number of clients, and the Python classes of this process that they
load. A later run that needs another number or other classes gets its own processes. The earlier
processes and their runs continue.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from potluck.deploy.local.demo_files import (
    DemoFiles,
    Machines,
    hold,
    reserved_port,
    write_federation_files,
)
from potluck.deploy.local.local_federation import LocalFederation
from potluck.deploy.operator.operator_client import OperatorClient
from potluck.federation.session_plugins import SessionPlugins


@dataclass(frozen=True, kw_only=True)
class PartyOptions:
    """Options of the processes; see `Federation.local`."""

    hosts: int
    device: str
    data: Path | None
    root: bool
    disclosure: Mapping[str, Any]


@dataclass(frozen=True)
class Party:
    """A running coordinator with its hosts, and an operator's connection to the coordinator."""

    files: DemoFiles
    federation: LocalFederation
    client: OperatorClient
    clients: int
    plugins: str


class LocalParties:
    """All parties of one `Federation.local`. The methods run on the background loop."""

    def __init__(self, folder: Path, options: PartyOptions, session: SessionPlugins) -> None:
        self.folder = folder
        self._options = options
        self._session = session
        self._stack = contextlib.AsyncExitStack()
        self._held = False
        self._parties: list[Party] = []

    @property
    def device(self) -> str:
        """The device on which the hosts train."""
        return self._options.device

    @property
    def parties(self) -> tuple[Party, ...]:
        """All parties, in the order they were started."""
        return tuple(self._parties)

    async def party(self, clients: int, run_file: str, questions: list[str]) -> Party:
        """Return the party with this number of clients and this process's classes; start it if new.

        questions: kinds of questions that selectors may ask its clients. Raises RunError if a
        process ends, or ConfigurationError and StorageError for the folder.
        """
        digest = self._session.write(self.folder)
        for party in reversed(self._parties):
            if (party.clients, party.plugins) == (clients, digest):
                return party
        return await self._start(clients, digest, run_file, questions)

    async def _start(self, clients: int, digest: str, run_file: str, questions: list[str]) -> Party:
        options = self._options
        if not self._held:
            self._stack.enter_context(hold(self.folder))
            self._held = True
        allowed: dict[str, Any] = {"questions": questions, "held_out_counts": True}
        machines = Machines(
            clients=clients,
            hosts=min(options.hosts, clients),
            device=options.device,
            data=options.data,
            disclosure=allowed | dict(options.disclosure),
            root=options.root,
        )
        async with contextlib.AsyncExitStack() as stack:
            port = stack.enter_context(reserved_port())
            place = self.folder / f"federation-{len(self._parties) + 1}"
            files = write_federation_files(place, run_file, machines, port)
            path = self._session.search_path(self.folder, digest)
            federation = LocalFederation(files, environment={"PYTHONPATH": path})
            await stack.enter_async_context(federation)
            await federation.start()
            client = await stack.enter_async_context(federation.operator())
            self._stack.push_async_exit(stack.pop_all())
        party = Party(files, federation, client, clients, digest)
        self._parties.append(party)
        return party

    async def close(self) -> None:
        """End all processes."""
        await self._stack.aclose()
        self._parties.clear()
