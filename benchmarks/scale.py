"""A thousand clients on ten hosts: time until all are connected, and of a round with a hundred.

Models are tiny and training is one step, so the time is that of managing many clients.

    python benchmarks/scale.py --clients 1000 --hosts 10 --clients-per-round 100 --rounds 3

With --data the task is MNIST from that data directory, one pass over each client's samples: a
simulation of many clients on few hosts, as experiments do, with the memory it takes.

    python benchmarks/scale.py --clients 3550 --hosts 2 --clients-per-round 710 --data data
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from potluck.deploy.local.demo_files import (
    DemoFiles,
    DemoOptions,
    Machines,
    reserved_port,
    write_demo_files,
    write_federation_files,
)
from potluck.deploy.local.local_federation import LocalFederation
from potluck.deploy.local.processes import LocalProcess, TetheredProcess

PLUGIN = Path(__file__).parent / "plugin"
_LOOK_SECONDS = 0.02


def install_plugin() -> None:
    """Make the task importable in this process and its child processes."""
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(PLUGIN), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    sys.path.insert(0, str(PLUGIN))


MNIST = """
rounds = {rounds}
clients_per_round = {count}
expected_clients = {clients}
seed = 1
task = {{ name = "mnist", clients = {clients}, partition = "uniform" }}
training = {{ epochs = 1, batch_size = 16 }}
evaluation = {{ every = 0 }}
round = {{ deadline_seconds = 3600.0 }}
"""


def system_files(process: LocalProcess) -> Path:
    """Return the folder in /proc of a process."""
    child = str(process.group)
    if isinstance(process, TetheredProcess):
        [child] = Path(f"/proc/{child}/task/{child}/children").read_text().split()
    return Path("/proc", child)


def resident(process: LocalProcess) -> dict[str, int]:
    """Return the bytes of a process's memory: private (RssAnon) and of mapped files (RssFile)."""
    lines = (system_files(process) / "status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {name: int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile")}


async def run(files: DemoFiles, clients: int) -> dict[str, float]:
    """Return the seconds until all clients are connected, to the first commit, and per round."""
    commits: list[float] = []
    async with LocalFederation(files) as federation:
        launched = time.perf_counter()
        await federation.start()
        async with federation.operator() as client:
            while True:
                if sum(each.attending for each in await client.list_clients()) == clients:
                    break
                await asyncio.sleep(_LOOK_SECONDS)
            attending = time.perf_counter()
            idle = {process.name: resident(process) for process in federation.processes}
            run_id = await client.start_run(files.run_file)
            async for event in client.watch_run(run_id):
                if event.WhichOneof("event") == "committed":
                    commits.append(time.perf_counter())
                elif event.status.reason:
                    raise RuntimeError(event.status.reason)
        busy = {process.name: resident(process) for process in federation.processes}
    seconds = [
        after - before for before, after in zip([attending, *commits], commits, strict=False)
    ]
    return {
        "clients": clients,
        "launch_to_attending_seconds": attending - launched,
        "first_round_seconds": seconds[0],
        "seconds_median": statistics.median(seconds[1:] or seconds),
        **memory(idle, "idle"),
        **memory(busy, "last round"),
    }


def memory(found: dict[str, dict[str, int]], when: str) -> dict[str, float]:
    """Return the memory of coordinator and largest host, in megabytes (10^6 bytes)."""
    hosts = [each for name, each in found.items() if name.startswith("host")]
    result: dict[str, float] = {}
    for field, what in (("RssAnon", "private"), ("RssFile", "mapped")):
        result[f"coordinator {what} MB, {when}"] = found["the coordinator"][field] / 1e6
        result[f"host {what} MB, {when}"] = max(each[field] for each in hosts) / 1e6
    return result


def measure_mnist(
    clients: int, hosts: int, count: int, rounds: int, data: Path
) -> dict[str, float]:
    """Run a federation that trains on MNIST. Return its measurements."""
    run_file = MNIST.format(rounds=rounds, count=count, clients=clients)
    machines = Machines(clients=clients, hosts=hosts, data=data)
    with tempfile.TemporaryDirectory(prefix="potluck-scale-") as name, reserved_port() as port:
        files = write_federation_files(Path(name) / "f", run_file, machines, port)
        return asyncio.run(run(files, clients))


def measure(clients: int, hosts: int, count: int, rounds: int) -> dict[str, float]:
    """Run a federation from launch to the last commit. Return its measurements."""
    install_plugin()
    options = DemoOptions(
        task="benchmark",
        selector="uniform",
        strategy="fedavg",
        clients=clients,
        hosts=hosts,
        count=count,
        rounds=rounds,
        seed=1,
        device="cpu",
        assignments=["task.parameters=100", "evaluation.every=0", "training.steps=1"],
    )
    with tempfile.TemporaryDirectory(prefix="potluck-scale-") as name, reserved_port() as port:
        return asyncio.run(run(write_demo_files(Path(name) / "f", options, port), clients))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--hosts", type=int, default=10)
    parser.add_argument("--clients-per-round", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--data", type=Path, help="train on MNIST from this data directory")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    size = (options.clients, options.hosts, options.clients_per_round, options.rounds)
    result = measure(*size) if options.data is None else measure_mnist(*size, options.data)
    if options.json:
        print(json.dumps(result))
        return
    table = Table(
        title=f"{options.clients} clients on {options.hosts} hosts, "
        f"{options.clients_per_round} a round"
    )
    table.add_column("what")
    table.add_column("seconds, or megabytes", justify="right")
    table.add_row("launch → all attend", f"{result['launch_to_attending_seconds']:.2f}")
    table.add_row("run started → first round", f"{result['first_round_seconds']:.2f}")
    table.add_row("a round, median", f"{result['seconds_median']:.2f}")
    for name, value in result.items():
        if "MB" in name:
            table.add_row(name, f"{value:.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
