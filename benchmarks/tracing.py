"""Cost of traces: every second round of one run is traced, to a collector on this machine.

python benchmarks/tracing.py --clients 20 --rounds 40 --epochs 100

It measures the processor time of the coordinator and of all hosts, by round. Each process sends its
spans every five seconds, both in traced and in other rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import tomlkit

from potluck.common.process.logs import LogLevel, configure_logging
from potluck.common.tracing import is_traced
from potluck.deploy.local.demo_files import DemoFiles, DemoOptions, reserved_port, write_demo_files
from potluck.deploy.local.local_federation import LocalFederation
from potluck.rpc.v1 import operator_pb2

SHARE = 0.5
_EXPORT = "opentelemetry.proto.collector.trace.v1.TraceService"


@dataclass(frozen=True)
class Cost:
    """Cost of a round: seconds since the commit before it, and processor seconds meanwhile."""

    number: int
    seconds: float
    processor: float


def collect(port_file: Path) -> None:
    """Run a collector that ignores all spans, in its own process. Write its port to a file."""

    def take(request: Any, context: grpc.ServicerContext) -> bytes:
        return b""

    server = grpc.server(ThreadPoolExecutor(2))
    method: Any = grpc.unary_unary_rpc_method_handler(take)
    handler = grpc.method_handlers_generic_handler(_EXPORT, {"Export": method})
    server.add_generic_rpc_handlers([handler])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    temporary = port_file.with_suffix(".new")
    temporary.write_text(str(port))
    temporary.replace(port_file)
    server.wait_for_termination()


@contextmanager
def running_collector(folder: Path) -> Iterator[int]:
    """Run a collector and yield its port."""
    port_file = folder / "port"
    process = subprocess.Popen([sys.executable, __file__, "--collect", str(port_file)])
    try:
        while not port_file.exists():
            time.sleep(0.05)
        yield int(port_file.read_text())
    finally:
        process.kill()
        process.wait()


def processor_seconds(folder: Path) -> float:
    """Return the processor seconds of all processes with the folder in their command line."""
    total = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder) not in (process / "cmdline").read_text():
                continue
            for thread in (process / "task").iterdir():
                total += int((thread / "schedstat").read_text().split()[0])
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total / 1e9


async def costs(files: DemoFiles) -> list[Cost]:
    """Run a federation. Return the cost of each round except the first two."""
    found: list[Cost] = []
    async with LocalFederation(files) as processes, processes.operator() as operator:
        await processes.start_coordinator()
        for number in range(len(files.hosts)):
            await processes.start_host(number)
        await processes.until_ready()
        run_id = await operator.start_run(files.run_file)
        before = (0.0, 0.0)
        async for event in operator.watch_run(run_id):
            if event.WhichOneof("event") == "committed":
                now = (time.monotonic(), processor_seconds(files.folder))
                spent = (now[0] - before[0], now[1] - before[1])
                found.append(Cost(event.committed.round, *spent))
                before = now
            if event.status.state == operator_pb2.RUN_STATE_FAILED:
                raise SystemExit(event.status.reason)
    return found[2:]


def cost(clients: int, number: int, epochs: int) -> dict[str, float]:
    """Run `clients` clients on two hosts, all of them in every round."""
    options = DemoOptions(
        task="digits", selector="uniform", strategy="fedavg", clients=clients, hosts=2,
        count=clients, rounds=number + 2, seed=7, device="cpu",
        assignments=[f"training.epochs={epochs}"],
    )  # fmt: skip
    with (
        tempfile.TemporaryDirectory() as name,
        reserved_port() as port,
        running_collector(Path(name)) as collector,
    ):
        files = write_demo_files(Path(name) / "federation", options, port)
        for path in (files.coordinator, *files.hosts):
            document = tomlkit.parse(path.read_text())
            endpoint = f"http://127.0.0.1:{collector}"
            document["tracing"] = {"endpoint": endpoint, "share": SHARE}
            path.write_text(tomlkit.dumps(document))
        found = asyncio.run(costs(files))
    traced = [each for each in found if is_traced(each.number, SHARE)]
    others = [each for each in found if not is_traced(each.number, SHARE)]
    processor = [statistics.median(each.processor for each in of) for of in (traced, others)]
    seconds = [statistics.median(each.seconds for each in of) for of in (traced, others)]
    return {
        "rounds": len(found),
        "seconds_of_other_rounds": seconds[1],
        "processor_seconds_of_other_rounds": processor[1],
        "ratio_of_seconds": seconds[0] / seconds[1],
        "ratio_of_processor_seconds": processor[0] / processor[1],
        "microseconds_by_client": 1e6 * (processor[0] - processor[1]) / clients,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--epochs", type=int, default=100, help="number of epochs per training")
    parser.add_argument("--collect", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.collect is not None:
        collect(options.collect)
        return
    configure_logging(level=LogLevel.ERROR)
    print(json.dumps(cost(options.clients, options.rounds, options.epochs), indent=2))


if __name__ == "__main__":
    main()
