"""Seconds per round of a real federation whose clients train nothing, compared with a lower bound.

A coordinator and N client processes run on this machine, with a model of M megabytes (10^6 bytes)
of float32; all clients are selected in every round. The lower bound (`floor.py`) is the time that
plain grpcio with mTLS takes to stream the same bytes between as many processes. It is measured just
before and just after.

    python benchmarks/round.py --clients 10 --megabytes 9 --rounds 5
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import floor
import tomlkit
from rich.console import Console
from rich.table import Table
from scale import system_files

from potluck.deploy.local.demo_files import DemoFiles, DemoOptions, reserved_port, write_demo_files
from potluck.deploy.local.local_federation import LocalFederation

PLUGIN = Path(__file__).parent / "plugin"


class PrivateMemory:
    """Private anonymous memory of a process (RssAnon), in bytes. Reading it often is cheap."""

    def __init__(self, pid: int) -> None:
        self._path = Path(f"/proc/{pid}/statm")
        self._page = os.sysconf("SC_PAGE_SIZE")

    def now(self) -> int:
        """Return the size of all resident pages except those of files and of shared memory."""
        _, resident, shared = self._path.read_bytes().split()[:3]
        return (int(resident) - int(shared)) * self._page


def processor_seconds(federation: LocalFederation) -> dict[str, float]:
    """Return the processor seconds of the coordinator, and of all hosts together."""
    found = {"coordinator": 0.0, "hosts": 0.0}
    for process in federation.processes:
        fields = (system_files(process) / "stat").read_text().rpartition(")")[2].split()
        side = "hosts" if process.name.startswith("host") else "coordinator"
        found[side] += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


def write_files(
    folder: Path,
    port: int,
    clients: int,
    parameters: int,
    rounds: int,
    transport: list[str],
    log_level: str = "info",
) -> DemoFiles:
    options = DemoOptions(
        task="benchmark",
        clients=clients,
        hosts=clients,
        count=clients,
        rounds=rounds,
        selector="uniform",
        strategy="fedavg",
        seed=1,
        device="cpu",
        assignments=[
            f"task.parameters={parameters}",
            "evaluation.every=0",
            "training.steps=1",
            *transport,
        ],
        root="secure_aggregation=true" in transport,
    )
    files = write_demo_files(folder, options, port)
    for path in (files.coordinator, *files.hosts):
        settings = tomlkit.parse(path.read_text())
        settings["log_level"] = log_level
        settings["log_format"] = "json"
        path.write_text(tomlkit.dumps(settings))
    return files


async def run(files: DemoFiles, rounds: int) -> dict[str, Any]:
    """Return the seconds between commits, and the coordinator's private memory meanwhile."""
    launched = time.perf_counter()
    commits: list[float] = []
    bytes_moved: list[int] = []
    computed: list[dict[str, float]] = []
    async with LocalFederation(files) as federation:
        await federation.start()
        pid = await federation.until_ready()
        memory = PrivateMemory(pid)
        baseline = peak = memory.now()
        async with federation.operator() as client:
            while True:
                attending = [c for c in await client.list_clients() if c.attending]
                if len(attending) == len(files.hosts):
                    break
                await asyncio.sleep(0.02)
            started = time.perf_counter()
            run_id = await client.start_run(files.run_file)
            sampling = asyncio.Event()

            async def sample() -> None:
                nonlocal peak
                while not sampling.is_set():
                    peak = max(peak, memory.now())
                    await asyncio.sleep(0.01)

            sampler = asyncio.create_task(sample())
            async for event in client.watch_run(run_id):
                if event.WhichOneof("event") == "committed":
                    commits.append(time.perf_counter())
                    computed.append(processor_seconds(federation))
                    bytes_moved.append(event.committed.bytes_down + event.committed.bytes_up)
                elif event.status.reason:
                    raise RuntimeError(event.status.reason)
            sampling.set()
            await sampler
    if len(commits) != rounds:
        raise RuntimeError(f"{len(commits)} of {rounds} rounds were committed")
    rounds_after_first = max(1, rounds - 1)
    return {
        "seconds": [b - a for a, b in itertools.pairwise(commits)],
        "first_round_seconds": commits[0] - started,
        "launch_to_first_round_seconds": commits[0] - launched,
        "processor_seconds": {
            side: (computed[-1][side] - computed[0][side]) / rounds_after_first
            for side in computed[0]
        },
        "private_mb": (peak - baseline) / 1e6,
        "bytes_per_client": statistics.median(bytes_moved[1:]) / len(files.hosts),
    }


def latencies(files: DemoFiles) -> list[float]:
    """Return the milliseconds from an instruction's queueing to its handler, from debug logs.

    Coordinator and hosts log the same monotonic clock, since they run on one machine.
    """
    queued: dict[str, float] = {}
    entered: dict[str, float] = {}
    for path, event, into in [
        (files.log("coordinator"), "instruction queued", queued),
        *((files.log(host.stem), "instruction received", entered) for host in files.hosts),
    ]:
        for line in path.read_text().splitlines():
            if event in line:
                entry = json.loads(line)
                into.setdefault(entry["id"], float(entry["monotonic"]))
    return [1e3 * (entered[key] - queued[key]) for key in entered if key in queued]


def measure(clients: int, megabytes: float, rounds: int, transport: list[str]) -> dict[str, Any]:
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(PLUGIN), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    sys.path.insert(0, str(PLUGIN))
    size = int(megabytes * 1e6)
    with tempfile.TemporaryDirectory(prefix="potluck-round-") as name, reserved_port() as port:
        folder = Path(name)
        files = write_files(folder / "f", port, clients, size // 4, rounds + 1, transport)
        hosts = [path.stem for path in files.hosts]
        before = floor.measure(files.folder / "pki", hosts, size, rounds)
        result = asyncio.run(run(files, rounds + 1))
        after = floor.measure(files.folder / "pki", hosts, size, rounds)
        # Logging every instruction takes time, so latency is measured separately, with a tiny
        # model.
        talkative = write_files(folder / "t", port, clients, 1000, rounds + 1, [], "debug")
        asyncio.run(run(talkative, rounds + 1))
        latency = statistics.median(latencies(talkative))
    floors = [each.seconds[1:] or each.seconds for each in (before, after)]
    return {
        "clients": clients,
        "megabytes": megabytes,
        "seconds_median": statistics.median(result["seconds"]),
        "seconds_min": min(result["seconds"]),
        "floor_seconds": statistics.median([*floors[0], *floors[1]]),
        "coordinator_processor_seconds": result["processor_seconds"]["coordinator"],
        "hosts_processor_seconds": result["processor_seconds"]["hosts"],
        "floor_processor_seconds": (before.processor_seconds + after.processor_seconds) / 2,
        "instruction_latency_ms": latency,
        "coordinator_private_mb": result["private_mb"],
        "bytes_per_client": result["bytes_per_client"],
        "first_round_seconds": result["first_round_seconds"],
        "launch_to_first_round_seconds": result["launch_to_first_round_seconds"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--megabytes", type=float, default=9.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "-o",
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a key of the run file, e.g. transport.up.encoding=int8",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    result = measure(options.clients, options.megabytes, options.rounds, options.set)
    if options.json:
        print(json.dumps(result))
        return
    table = Table(title=f"{options.clients} clients, {options.megabytes:g} MB, no training")
    table.add_column("what")
    table.add_column("value", justify="right")
    ratio = result["seconds_median"] / result["floor_seconds"]
    computed = result["coordinator_processor_seconds"] + result["hosts_processor_seconds"]
    for what, value in (
        ("seconds per round, median", f"{result['seconds_median']:.3f}"),
        ("seconds per round, least", f"{result['seconds_min']:.3f}"),
        ("floor: plain grpcio with mTLS", f"{result['floor_seconds']:.3f}"),
        ("median / floor", f"{ratio:.2f}"),
        ("processor s per round, all", f"{computed:.3f}"),
        ("… the coordinator's", f"{result['coordinator_processor_seconds']:.3f}"),
        ("processor / floor's", f"{computed / result['floor_processor_seconds']:.2f}"),
        ("instruction latency, median", f"{result['instruction_latency_ms']:.2f} ms"),
        ("coordinator's private memory", f"{result['coordinator_private_mb']:.1f} MB"),
        ("bytes per client and round", f"{result['bytes_per_client']:.0f}"),
        ("run started → first round", f"{result['first_round_seconds']:.2f} s"),
        ("launch → first round", f"{result['launch_to_first_round_seconds']:.2f} s"),
    ):
        table.add_row(what, value)
    Console().print(table)


if __name__ == "__main__":
    main()
