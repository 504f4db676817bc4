"""Rounds of a very large model: seconds, and private memory relative to the model's size.

A coordinator and a few hosts run on this machine; each host has one client, and all are selected.
All of the model's tensors get a gradient, each client takes one step of SGD, and the coordinator
evaluates each round. Memory is RssAnon, the private pages that the kernel can't drop, above the
process's value before the run. It excludes mapped files. Both sides' memory is given in multiples
of the model's size. Processor time is that of all processes; on a busy machine, compare processor
time instead of seconds.

    python benchmarks/large_model.py --megabytes 600 --hosts 2 --rounds 3
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from scale import install_plugin, resident, system_files

from potluck.deploy.local.demo_files import DemoFiles, DemoOptions, reserved_port, write_demo_files
from potluck.deploy.local.local_federation import LocalFederation

_LOOK_SECONDS = 0.02


class Peaks:
    """Maximum private memory of each process, by round; rounds count from 0."""

    def __init__(self, federation: LocalFederation) -> None:
        self._processes = federation.processes
        self._before = self._now()
        self.rounds: list[dict[str, int]] = [{}]
        self.processor = [self._processor()]

    def _now(self) -> dict[str, int]:
        return {process.name: resident(process)["RssAnon"] for process in self._processes}

    def _processor(self) -> float:
        """Return the processor seconds of all processes."""
        ticks = 0
        for process in self._processes:
            fields = (system_files(process) / "stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def next_round(self) -> None:
        """Begin the next round's measurement, after a commit."""
        self.rounds.append({})
        self.processor.append(self._processor())

    def look(self) -> None:
        """Sample the memory of all processes once."""
        peaks = self.rounds[-1]
        for name, held in self._now().items():
            peaks[name] = max(peaks.get(name, 0), held - self._before[name])

    def of(self, *, hosts: bool, rounds: slice) -> int:
        """Return the maximum over all hosts, or the coordinator's, in some rounds."""
        return max(
            held
            for peaks in self.rounds[rounds]
            for name, held in peaks.items()
            if name.startswith("host") == hosts
        )


async def run(files: DemoFiles, clients: int) -> tuple[list[float], Peaks]:
    """Return the seconds of each round, and the processes' peak memory."""
    async with LocalFederation(files) as federation:
        await federation.start()
        async with federation.operator() as client:
            while True:
                if sum(each.attending for each in await client.list_clients()) == clients:
                    break
                await asyncio.sleep(_LOOK_SECONDS)
            peaks = Peaks(federation)
            times = [time.perf_counter()]

            async def look() -> None:
                while True:
                    peaks.look()
                    await asyncio.sleep(_LOOK_SECONDS)

            looking = asyncio.create_task(look())
            run_id = await client.start_run(files.run_file)
            async for event in client.watch_run(run_id):
                if event.WhichOneof("event") == "committed":
                    times.append(time.perf_counter())
                    peaks.next_round()
                elif event.status.reason:
                    raise RuntimeError(event.status.reason)
            looking.cancel()
    return [after - before for before, after in itertools.pairwise(times)], peaks


def measure(
    megabytes: float, tensors: int, hosts: int, rounds: int, assignments: list[str]
) -> dict[str, Any]:
    """Run one federation. Return the costs of its rounds."""
    install_plugin()
    size = int(megabytes * 1e6)
    options = DemoOptions(
        task="deep",
        selector="uniform",
        strategy="fedavg",
        clients=hosts,
        hosts=hosts,
        count=hosts,
        rounds=rounds,
        seed=1,
        device="cpu",
        assignments=[
            f"task.parameters={size // 4}",
            f"task.tensors={tensors}",
            "training.steps=1",
            *assignments,
        ],
    )
    with tempfile.TemporaryDirectory(prefix="potluck-large-") as name, reserved_port() as port:
        files = write_demo_files(Path(name) / "f", options, port)
        seconds, peaks = asyncio.run(run(files, hosts))
    computed = [after - before for before, after in itertools.pairwise(peaks.processor)]
    first, later = slice(0, 1), slice(1, rounds) if rounds > 1 else slice(0, 1)
    return {
        "megabytes": megabytes,
        "hosts": hosts,
        "first_round_seconds": seconds[0],
        "seconds_median": statistics.median(seconds[1:] or seconds),
        "first_round_processor_seconds": computed[0],
        "processor_seconds_median": statistics.median(computed[1:] or computed),
        "coordinator_first_round": peaks.of(hosts=False, rounds=first) / size,
        "coordinator_later_rounds": peaks.of(hosts=False, rounds=later) / size,
        "host_first_round": peaks.of(hosts=True, rounds=first) / size,
        "host_later_rounds": peaks.of(hosts=True, rounds=later) / size,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=float, default=600.0)
    parser.add_argument("--tensors", type=int, default=20)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "-o",
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a key of the run file, e.g. transport.down.delta=true",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    result = measure(options.megabytes, options.tensors, options.hosts, options.rounds, options.set)
    if options.json:
        print(json.dumps(result))
        return
    table = Table(title=f"a model of {options.megabytes:g} MB, {options.hosts} hosts")
    table.add_column("what")
    table.add_column("value", justify="right")
    table.add_row("run started → first round", f"{result['first_round_seconds']:.1f} s")
    table.add_row("a round, median", f"{result['seconds_median']:.1f} s")
    computed = result["first_round_processor_seconds"], result["processor_seconds_median"]
    table.add_row("processor time, first round", f"{computed[0]:.1f} s")
    table.add_row("processor time, a round, median", f"{computed[1]:.1f} s")
    for side in ("coordinator", "host"):
        for which in ("first round", "later rounds"):
            share = result[f"{side}_{which.replace(' ', '_')}"]
            table.add_row(f"{side}'s private memory / model, {which}", f"{share:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
