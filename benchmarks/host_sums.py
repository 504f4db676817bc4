"""Bytes and seconds of rounds with and without sums of updates on hosts.

A coordinator and H host processes run on this machine. N clients are spread over the hosts and
train in every round. The model has M megabytes (10^6 bytes) of float32; every parameter changes by
about 0.01. Runs with and without sums alternate on the same processes. Then the run with sums is
repeated on other numbers of hosts, and with all hosts behind some relays. Its last model must be
the same, bit for bit.

    python benchmarks/host_sums.py --clients 100 --hosts 10 --megabytes 9 --rounds 3
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from potluck.deploy.local.demo_files import (
    DemoFiles,
    DemoOptions,
    program,
    reserved_port,
    write_demo_files,
)
from potluck.deploy.local.local_federation import LocalFederation
from potluck.deploy.local.processes import TetheredProcess, stop_all
from potluck.deploy.local.relay_files import write_relay
from potluck.deploy.operator.operator_client import OperatorClient
from potluck.deploy.operator.run_overrides import override

PLUGIN = Path(__file__).parent / "plugin"
SUMS = ("host_sums.enabled=true", "host_sums.weight_unit=2")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Result of one run. seconds: of each round except the first. bytes_up: of each round.

    digest: digest of the last model.
    """

    seconds: Sequence[float]
    bytes_up: float
    digest: str


async def one_run(client: OperatorClient, files: DemoFiles, *assignments: str) -> Measured:
    run_id = await client.start_run(override(files.run_file, assignments, source="benchmark"))
    commits: list[float] = []
    moved: list[int] = []
    digest = ""
    async for event in client.watch_run(run_id):
        if event.WhichOneof("event") == "committed":
            commits.append(time.perf_counter())
            moved.append(event.committed.bytes_up)
        elif event.status.reason:
            raise RuntimeError(event.status.reason)
        digest = event.status.model_blake3 or digest
    return Measured(
        seconds=[b - a for a, b in itertools.pairwise(commits)],
        bytes_up=statistics.median(moved),
        digest=digest,
    )


@contextlib.asynccontextmanager
async def relays(files: DemoFiles, count: int) -> AsyncIterator[None]:
    """Run `count` relays, each for a part of the hosts, while the block runs."""
    running: list[TetheredProcess] = []
    with contextlib.ExitStack() as ports:
        try:
            for number in range(count):
                behind = range(number, len(files.hosts), count)
                port = ports.enter_context(reserved_port())
                made = write_relay(files, f"relay-{number}", behind, port)
                command = [program("potluck-relay"), "--config", str(made.config)]
                log = files.log(made.name)
                running.append(await TetheredProcess.start(made.name, command, log=log))
            yield
        finally:
            await stop_all(running)


async def federation(
    folder: Path,
    port: int,
    options: argparse.Namespace,
    hosts: int,
    kinds: Sequence[Sequence[str]],
    relay_count: int = 0,
) -> list[Measured]:
    """Make runs of these kinds, one after another, on the same processes."""
    demo = DemoOptions(
        task="shifted",
        clients=options.clients,
        hosts=hosts,
        count=options.clients,
        rounds=options.rounds + 1,
        selector="uniform",
        strategy="fedavg",
        seed=1,
        device="cpu",
        assignments=[
            f"task.parameters={int(options.megabytes * 1e6) // 4}",
            "evaluation.every=0",
            "training.steps=1",
            "training.learning_rate=0.1",
        ],
    )
    files = write_demo_files(folder, demo, port)
    async with relays(files, relay_count), LocalFederation(files) as processes:
        await processes.start()
        await processes.until_ready()
        async with processes.operator() as client:
            while True:
                attending = [c for c in await client.list_clients() if c.attending]
                if len({c.host_id for c in attending}) == hosts:
                    break
                await asyncio.sleep(0.02)
            return [await one_run(client, files, *kind) for kind in kinds]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(PLUGIN), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    sys.path.insert(0, str(PLUGIN))

    def on(hosts: int, kinds: Sequence[Sequence[str]], relay_count: int = 0) -> list[Measured]:
        with tempfile.TemporaryDirectory(prefix="potluck-sums-") as name, reserved_port() as port:
            folder = Path(name) / "f"
            return asyncio.run(federation(folder, port, options, hosts, kinds, relay_count))

    both = on(options.hosts, [(), SUMS] * options.repeats)
    without, with_sums = both[::2], both[1::2]
    others = {hosts: on(hosts, [SUMS])[0] for hosts in options.other_hosts}
    relayed = {count: on(options.hosts, [SUMS], count)[0] for count in options.relays}
    digests = {each.digest for each in (*with_sums, *others.values(), *relayed.values())}

    def seconds(runs: Sequence[Measured]) -> float:
        return statistics.median(itertools.chain.from_iterable(run.seconds for run in runs))

    return {
        "clients": options.clients,
        "hosts": options.hosts,
        "megabytes": options.megabytes,
        "bytes_up": without[0].bytes_up,
        "bytes_up_with_sums": with_sums[0].bytes_up,
        "bytes_ratio": with_sums[0].bytes_up / without[0].bytes_up,
        "bytes_up_of_other_hosts": {hosts: each.bytes_up for hosts, each in others.items()},
        "bytes_up_through_relays": {count: each.bytes_up for count, each in relayed.items()},
        "bytes_ratio_through_relays": {
            count: each.bytes_up / without[0].bytes_up for count, each in relayed.items()
        },
        "seconds": seconds(without),
        "seconds_with_sums": seconds(with_sums),
        "seconds_ratio": seconds(with_sums) / seconds(without),
        "same_model": len(digests) == 1 and "" not in digests,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--hosts", type=int, default=10)
    parser.add_argument("--megabytes", type=float, default=9.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--repeats", type=int, default=2, help="number of runs of each kind; kinds alternate"
    )
    parser.add_argument(
        "--other-hosts",
        type=int,
        nargs="*",
        default=[4],
        metavar="H",
        help="other numbers of hosts, with which the model must be the same",
    )
    parser.add_argument(
        "--relays",
        type=int,
        nargs="*",
        default=[2],
        metavar="R",
        help="numbers of relays between coordinator and hosts",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    result = measure(options)
    if options.json:
        print(json.dumps(result))
        return
    title = f"{options.clients} clients on {options.hosts} hosts, {options.megabytes:g} MB"
    table = Table("what", "without", "with sums", "ratio", title=title)
    up, summed = result["bytes_up"] / 1e6, result["bytes_up_with_sums"] / 1e6
    table.add_row("MB up per round", f"{up:.1f}", f"{summed:.1f}", f"{result['bytes_ratio']:.3f}")
    table.add_row(
        "seconds per round",
        f"{result['seconds']:.2f}",
        f"{result['seconds_with_sums']:.2f}",
        f"{result['seconds_ratio']:.2f}",
    )
    for count, bytes_up in result["bytes_up_through_relays"].items():
        table.add_row(
            f"MB up per round, through {count} relays",
            f"{up:.1f}",
            f"{bytes_up / 1e6:.1f}",
            f"{result['bytes_ratio_through_relays'][count]:.3f}",
        )
    table.add_row(
        "same model on other hosts and through relays",
        "",
        "yes" if result["same_model"] else "NO",
        "",
    )
    Console().print(table)


if __name__ == "__main__":
    main()
