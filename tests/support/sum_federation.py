"""A federation for secure sums in one process: a real coordinator and real client agents, each on
a host of its own, over real gRPC with certificates of a federation with a root."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
from numpy.typing import NDArray
from support.pki import TestFederation, make_federation, server_credentials

from potluck.client.agent import Agent
from potluck.client.base.host_metrics import HostMetrics
from potluck.client.base.state_directory import StateDirectory
from potluck.client.config import ClientConfig
from potluck.client.disclosure.disclosure_policy import DisclosurePolicy
from potluck.client.disclosure.release_ledger import Release, ReleaseLedger
from potluck.common.disclosure import SumKind
from potluck.common.learning.sample_counts import label_counts
from potluck.common.monitoring.instruments import Instruments
from potluck.common.monitoring.metric_labels import MeasuredParty
from potluck.common.names import ClientId
from potluck.common.net.tls import SERVER_OPTIONS
from potluck.common.tasks.digits import Digits
from potluck.deploy.operator.operator_client import OperatorClient, connect
from potluck.deploy.operator.operator_config import OperatorConfig
from potluck.deploy.pki.federation_root import add_members, create_root
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1 import coordinator_pb2_grpc, operator_pb2_grpc
from potluck.secagg.coordinator.counts import SecureSums, SumOutcome
from potluck.secagg.coordinator.sum_session import SumSession, SumTerms
from potluck.secagg.host.sum_ledger import SumLedger
from potluck.secagg.host.sum_sessions import SumSessions
from potluck.secagg.protocol import CoordinatorSession, MessageType
from potluck.server.config import CoordinatorConfig
from potluck.server.hosts.limits import Limits
from potluck.server.service.coordinator import Coordinator
from potluck.server.service.guard import Guard
from potluck.server.service.host_service import CoordinatorService
from potluck.server.service.operator_service import OperatorService
from potluck.server.service.revocations import Revoking
from potluck.server.store import RunRow, SecureSum

PATIENCE_SECONDS = 240.0
EXACT = DisclosurePolicy(exact_sums=True, questions=("label-entropy",), masked_runs=1000)
"""Hosts' default disclosure policy in tests: exact sums and one question are allowed."""


def host_of(client: str) -> str:
    return client.replace("client", "host")


@dataclass
class Members:
    """Certificates, a root, and one member record per client."""

    folder: Path
    names: Sequence[str]
    tls: TestFederation
    root: Path
    instruments: dict[str, Instruments] = field(default_factory=dict)
    """Metrics of each client's host."""

    @classmethod
    def make(cls, folder: Path, clients: int) -> Members:
        names = [f"client-{number}" for number in range(clients)]
        tls = make_federation(folder / "pki", {host_of(name): [name] for name in names})
        root = folder / "root"
        create_root(root, tls.name)
        for name in names:
            add_members(root, [name], host_of(name))
        return cls(folder, names, tls, root)

    def config(self, client: str, port: int, folder: Path, **changes: Any) -> ClientConfig:
        values: dict[str, Any] = {
            "coordinator": f"127.0.0.1:{port}",
            "clients": (client,),
            "state_directory": folder / host_of(client),
            "device": "cpu",
            "reconnect_maximum_seconds": 0.2,
            "tls": self.tls.hosts[host_of(client)],
            "member_key": self.root / "members",
            "members": self.root / "members.json",
            "federation_root": self.root / "root.pub",
            "disclosure": EXACT,
        }
        return ClientConfig.model_validate(values | changes)

    @contextlib.asynccontextmanager
    async def host(
        self, client: str, port: int, folder: Path, **changes: Any
    ) -> AsyncIterator[asyncio.Task[None]]:
        """Run a connected client agent."""
        config = self.config(client, port, folder, **changes)
        state = StateDirectory(config.state_directory)
        instruments = self.instruments[client] = Instruments(MeasuredParty.HOST)
        agent = Agent(
            config,
            state,
            device="cpu",
            generator=random.Random(0),
            metrics=HostMetrics(instruments),
        )
        running = asyncio.create_task(agent.run())
        try:
            yield running
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
            state.close()


@dataclass
class SumFederation:
    """A coordinator, and its connected hosts."""

    members: Members
    folder: Path
    coordinator: Coordinator
    port: int
    agents: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    stack: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)

    @property
    def sums(self) -> SecureSums:
        sums = self.coordinator.runs.sums
        assert isinstance(sums, SecureSums)
        return sums

    async def start(
        self, clients: Sequence[str] = (), *, port: int | None = None, **changes: Any
    ) -> None:
        """Start the hosts of these clients, by default of all, and wait until they are connected.

        port: port to which they connect; by default the coordinator's.
        """
        for name in clients or self.members.names:
            host = self.members.host(name, port or self.port, self.folder, **changes)
            self.agents[name] = await self.stack.enter_async_context(host)
        attendance, changed = self.coordinator.attendance, asyncio.Event()
        stop = attendance.listen(lambda *_: changed.set())
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not set(self.agents) <= set(attendance.clients):
                changed.clear()
                await changed.wait()
        stop()

    def terms(self, **changes: Any) -> SumTerms:
        values: dict[str, Any] = {
            "run_id": "run",
            "kind": SumKind.TOTAL,
            "subject": "label counts of digits",
            "task": rpc.Plugin(
                name="digits", options_json=f'{{"clients": {len(self.members.names)}}}'
            ),
            "task_reference": "{}",
            "classes": 10,
            "least_hosts": 5,
            "colluding_hosts": None,
            "stage_seconds": 20.0,
        }
        return SumTerms(**(values | changes))

    async def sum(self, clients: Sequence[str] = (), **changes: Any) -> SumOutcome:
        return await self.sums.sum_counts(
            self.terms(**changes),
            clients or self.members.names,
            present=lambda client: client in self.coordinator.attendance.clients,
        )

    def counts(self, clients: Sequence[str]) -> NDArray[np.int64]:
        """Return the sum of some clients' true counts."""
        task = Digits(clients=len(self.members.names))
        total: NDArray[np.int64] = np.zeros(10, np.int64)
        for client in clients:
            total += label_counts(task.client_data(ClientId(client), Path()).train, 10)
        return total

    def ledger(self, client: str) -> SumLedger:
        """Return the host's ledger on disk of a client's sums."""
        return SumLedger(self.folder / host_of(client) / "sums")

    async def finished(self, run_file: str) -> RunRow:
        """Start a run, wait until it has ended, and return its row."""
        row = await self.coordinator.start_run(run_file)
        return await self.ended(row.run_id)

    async def watched(self, run_file: str) -> tuple[RunRow, list[str]]:
        """Start a run and wait until it has ended; return its row and the texts of its notices."""
        row = await self.coordinator.start_run(run_file)
        driver = self.coordinator.runs.driver(row.run_id)
        assert driver is not None
        said: list[str] = []
        events = driver.feed.watch()
        while (event := await events.get()) is not None:
            said.append(event.notice.text)
        return await self.ended(row.run_id), [text for text in said if text]

    async def ended(self, run_id: str) -> RunRow:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while self.coordinator.runs.driver(run_id) is not None:  # noqa: ASYNC110  # no signal for it
                await asyncio.sleep(0.02)
        return await self.coordinator.archive.run(run_id)

    def has_released(self, client: str) -> bool:
        return bool(self.ledger(client).of(client).releases)

    def disclosed(self, client: str) -> list[Release]:
        """Return the host's record on disk of a client's other disclosures."""
        ledger = ReleaseLedger(self.folder / host_of(client) / "disclosures")
        return list(ledger.of(client).releases)

    @contextlib.asynccontextmanager
    async def operator(self) -> AsyncIterator[OperatorClient]:
        config = OperatorConfig(coordinator=f"127.0.0.1:{self.port}", tls=self.members.tls.operator)
        async with connect(config) as client:
            yield client

    async def stored(self) -> list[SecureSum]:
        return await self.coordinator.store.call(lambda store: store.sums())


@contextlib.asynccontextmanager
async def sum_federation(
    members: Members,
    folder: Path,
    *,
    port: int = 0,
    rooted: bool = True,
    instruments: Instruments | None = None,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    **coordinator: Any,
) -> AsyncIterator[SumFederation]:
    """Run a coordinator; `start` starts its hosts."""
    values: dict[str, Any] = {
        "state_directory": folder / "coordinator",
        "heartbeat_seconds": 0.2,
        "federation_root": members.root / "root.pub" if rooted else None,
        "members": members.root / "members.json" if rooted else None,
        "tls": members.tls.coordinator,
    }
    config = CoordinatorConfig.model_validate(values | coordinator)
    measuring = instruments or Instruments(MeasuredParty.COORDINATOR)
    async with Coordinator.opened(config, measuring) as opened:
        guard = Guard(Limits(), lambda _: None, lambda *_: None)
        server = grpc.aio.server(interceptors=[*interceptors, guard], options=SERVER_OPTIONS)
        coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(
            CoordinatorService(opened), server
        )
        credentials = server_credentials(members.tls.coordinator)
        port = server.add_secure_port(f"127.0.0.1:{port}", credentials)
        revoking = Revoking(opened.config.state_directory, members.tls.operator.authority, None)
        operator_pb2_grpc.add_OperatorServiceServicer_to_server(
            OperatorService(opened, revoking), server
        )
        await server.start()
        federation = SumFederation(members, folder, opened, port)
        try:
            yield federation
        finally:
            await federation.stack.aclose()
            opened.attendance.close()
            await server.stop(1.0)


@contextlib.contextmanager
def silent(monkeypatch: Any, stages: Mapping[str, MessageType]) -> Iterator[None]:
    """Make clients stop answering from a message on. stages: that message, by client.

    A stage that waits only for silent clients times out at once; other stages keep their time.
    """
    honest, patient = SumSessions.answer, SumSession._next
    quiet = set[str]()

    async def answer(self: SumSessions, instruction: rpc.Instruction, count: Any) -> Any:
        last = stages.get(instruction.client_id)
        if last is not None and instruction.secure.envelope.type >= last:
            quiet.add(instruction.client_id)
            await asyncio.Event().wait()
        return await honest(self, instruction, count)

    async def following(self: SumSession, session: CoordinatorSession, left: float) -> Any:
        return await patient(self, session, 0.0 if quiet.issuperset(session.awaited) else left)

    with monkeypatch.context() as patched:
        patched.setattr(SumSessions, "answer", answer)
        patched.setattr(SumSession, "_next", following)
        yield


@contextlib.contextmanager
def holding(monkeypatch: Any, counts: Mapping[str, list[int]]) -> Iterator[None]:
    """Set the clients' numbers of samples by class."""
    honest = SumSessions.answer

    async def answer(self: SumSessions, instruction: rpc.Instruction, count: Any) -> Any:
        async def held() -> list[int]:
            return counts[instruction.client_id]

        return await honest(self, instruction, held)

    with monkeypatch.context() as patched:
        patched.setattr(SumSessions, "answer", answer)
        yield
