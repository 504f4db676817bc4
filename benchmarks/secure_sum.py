"""Duration of a secure sum of label counts over gRPC.

    python benchmarks/secure_sum.py --clients 100 --hosts 100 --processes 4 --repeats 5

A coordinator in this process and real client agents, each with its host's certificate, communicate
over gRPC on loopback with mutual TLS. The time is from the first invitation to the unmasked sum in
the coordinator's database. `--hosts` is the number of hosts, which have equally many clients;
`--processes` is the number of processes in which their agents run. Every session sums the same
clients' counts of the task `digits`. The first one, in which tasks are loaded, isn't counted.

It also prints the processor time of the coordinator and of all hosts together, and that of one
Ed25519 verification in the same run. The latter shows how busy the machine is: about 100 µs on an
idle core.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import structlog
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from potluck.client.agent import Agent
from potluck.client.base.state_directory import StateDirectory
from potluck.client.config import ClientConfig
from potluck.client.disclosure.disclosure_policy import DisclosurePolicy
from potluck.common.disclosure import SumKind
from potluck.common.monitoring.instruments import Instruments
from potluck.common.monitoring.metric_labels import MeasuredParty
from potluck.common.net.identity import Role
from potluck.common.net.tls import SERVER_OPTIONS, TlsFiles
from potluck.deploy.pki import authority as pki
from potluck.deploy.pki.federation_root import add_members, create_root
from potluck.rpc.v1 import coordinator_pb2, coordinator_pb2_grpc
from potluck.secagg.coordinator.counts import SecureSums
from potluck.secagg.coordinator.sum_session import SumTerms
from potluck.server.config import CoordinatorConfig
from potluck.server.hosts.limits import Limits
from potluck.server.service.certificate import ServerCertificate
from potluck.server.service.coordinator import Coordinator
from potluck.server.service.guard import Guard
from potluck.server.service.host_service import CoordinatorService

GOALS = {10: 0.3, 100: 4.0}
"""Target durations in seconds, by number of clients, on two cores."""


@dataclass(frozen=True)
class Federation:
    """Certificates and member records in a folder."""

    folder: Path
    clients: dict[str, list[str]]
    """Clients by host."""

    @classmethod
    def make(cls, folder: Path, clients: int, hosts: int) -> Federation:
        """Make the certificates and records of a new federation."""
        found: dict[str, list[str]] = {f"host-{number}": [] for number in range(hosts)}
        for number in range(clients):
            found[f"host-{number % hosts}"].append(f"client-{number}")
        pki.create_authority(folder, "bench")
        pki.issue(folder, Role.COORDINATOR, "coordinator", hosts=("127.0.0.1",))
        create_root(folder / "root", "bench")
        for host, names in found.items():
            pki.issue(folder, Role.HOST, host, clients=names)
            add_members(folder / "root", names, host)
        return cls(folder, found)

    def tls(self, name: str) -> TlsFiles:
        """Return the TLS files of a host or of the coordinator."""
        return TlsFiles(
            certificate=self.folder / f"{name}.pem",
            key=self.folder / f"{name}.key",
            authority=self.folder / "authority.pem",
        )

    def agent(self, host: str, port: int) -> Agent:
        """Return the agent of a host."""
        root = self.folder / "root"
        config = ClientConfig(
            coordinator=f"127.0.0.1:{port}",
            clients=tuple(self.clients[host]),
            state_directory=self.folder / "state" / host,
            device="cpu",
            tls=self.tls(host),
            member_key=root / "members",
            members=root / "members.json",
            federation_root=root / "root.pub",
            disclosure=DisclosurePolicy(exact_sums=True),
        )
        state = StateDirectory(config.state_directory)
        return Agent(config, state, device="cpu", generator=random.Random(host))


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--hosts", type=int, default=0, help="number of hosts; 0: one per client")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--attend", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    quiet = structlog.make_filtering_bound_logger(40)
    structlog.configure(
        wrapper_class=quiet, logger_factory=structlog.PrintLoggerFactory(sys.stderr)
    )
    hosts = options.hosts or options.clients
    if options.attend:
        folder, (port, first, step) = Path(options.attend[0]), map(int, options.attend[1:])
        clients = json.loads((folder / "clients.json").read_text())
        asyncio.run(attend(Federation(folder, clients), port, list(clients)[first::step]))
        return
    with tempfile.TemporaryDirectory(prefix="potluck-sum-") as temporary:
        federation = Federation.make(Path(temporary), options.clients, hosts)
        (Path(temporary) / "clients.json").write_text(json.dumps(federation.clients))
        result = asyncio.run(measure(federation, options.processes, options.repeats))
    print(json.dumps(result) if options.json else shown(result))


async def attend(federation: Federation, port: int, hosts: Sequence[str]) -> None:
    """Run some hosts' agents until this process is ended."""
    await asyncio.gather(*(federation.agent(host, port).run() for host in hosts))


@contextlib.asynccontextmanager
async def serving(federation: Federation) -> AsyncIterator[tuple[Coordinator, int]]:
    """Yield a coordinator, and the port on which it listens."""
    root = federation.folder / "root"
    config = CoordinatorConfig.model_validate(
        {
            "state_directory": federation.folder / "coordinator",
            "federation_root": root / "root.pub",
            "members": root / "members.json",
            "tls": federation.tls("coordinator"),
        }
    )
    async with Coordinator.opened(config, Instruments(MeasuredParty.COORDINATOR)) as coordinator:
        guard = Guard(Limits(), lambda _: None, lambda *_: None)
        server = grpc.aio.server(interceptors=[guard], options=SERVER_OPTIONS)
        coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(
            CoordinatorService(coordinator), server
        )
        credentials = ServerCertificate(config.tls).credentials()
        port = server.add_secure_port("127.0.0.1:0", credentials)
        await server.start()
        try:
            yield coordinator, port
        finally:
            coordinator.attendance.close()
            await server.stop(1.0)


async def measure(federation: Federation, processes: int, repeats: int) -> dict[str, Any]:
    """Run sums over all clients, one after the other."""
    names = sorted(name for some in federation.clients.values() for name in some)
    async with serving(federation) as (coordinator, port):
        children = [
            await asyncio.create_subprocess_exec(
                *(sys.executable, __file__, "--attend", str(federation.folder), str(port)),
                *(str(first), str(processes)),
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for first in range(min(processes, len(federation.clients)))
        ]
        try:
            async with asyncio.timeout(300):
                while len(coordinator.attendance.clients) < len(names):  # noqa: ASYNC110  no signal for it
                    await asyncio.sleep(0.05)
            sessions = [
                await one_sum(coordinator, names, [child.pid for child in children])
                for _ in range(repeats + 1)
            ][1:]
        finally:
            for child in children:
                child.terminate()
            await asyncio.gather(*(child.wait() for child in children))
    middle = {
        key: round(statistics.median(session[key] for session in sessions), 4)
        for key in sessions[0]
    }
    return {
        "clients": len(names),
        "hosts": len(federation.clients),
        "processes": processes,
        **middle,
        "least_seconds": round(min(session["seconds"] for session in sessions), 4),
        "goal_seconds": GOALS.get(len(names)),
    }


async def one_sum(coordinator: Coordinator, names: list[str], pids: list[int]) -> dict[str, float]:
    """Run one session. Return its seconds, and the processor seconds of coordinator and hosts."""
    terms = SumTerms(
        run_id="bench",
        kind=SumKind.TOTAL,
        subject="label counts",
        task=coordinator_pb2.Plugin(name="digits", options_json=f'{{"clients": {len(names)}}}'),
        task_reference="{}",
        classes=10,
        least_hosts=5,
        colluding_hosts=None,
        stage_seconds=300.0,
    )
    begun, own, theirs = time.perf_counter(), cpu(), sum(map(cpu_of, pids))
    sums = coordinator.runs.sums
    assert isinstance(sums, SecureSums)
    outcome = await sums.sum_counts(terms, names, present=lambda _: True)
    seconds = time.perf_counter() - begun
    if outcome.total is None or len(outcome.record.clients) != len(names):
        raise SystemExit(f"no sum over all clients: {outcome.explain()}")
    await settled(pids)  # the last shares may still arrive
    return {
        "seconds": seconds,
        "coordinator_cpu_seconds": cpu() - own,
        "hosts_cpu_seconds": sum(map(cpu_of, pids)) - theirs,
        "verification_microseconds": verification(),
    }


async def settled(pids: list[int]) -> None:
    """Wait until the hosts do nothing except heartbeats."""
    before = -1.0
    while (now := sum(map(cpu_of, pids))) - before > 0.02:
        before = now
        await asyncio.sleep(0.5)


def cpu() -> float:
    """Return the processor seconds of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def cpu_of(pid: int) -> float:
    """Return the processor seconds of another process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def verification() -> float:
    """Return the processor microseconds of one Ed25519 verification, measured now."""
    key, message = Ed25519PrivateKey.generate(), bytes(800)
    public, signature = key.public_key(), key.sign(message)
    begun = time.thread_time()
    for _ in range(200):
        public.verify(signature, message)
    return (time.thread_time() - begun) / 200 * 1e6


def shown(result: dict[str, Any]) -> str:
    """Return the result as text."""
    goal = result["goal_seconds"]
    lines = [
        (
            f"{result['clients']} clients on {result['hosts']} hosts in {result['processes']} "
            f"processes: {result['seconds']:.2f} s a sum, at least {result['least_seconds']:.2f} s"
        ),
        (
            f"processor seconds: coordinator {result['coordinator_cpu_seconds']:.2f}, "
            f"hosts {result['hosts_cpu_seconds']:.2f}"
        ),
        f"an Ed25519 verification took {result['verification_microseconds']:.0f} µs",
    ]
    if goal is not None:
        lines.append(f"goal: {goal:g} s on two idle cores")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
