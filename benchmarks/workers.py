"""One host with several worker processes, side by side with as many hosts with one each.

Both train the same clients of a case of `simulation.py` in a federation of real processes. They
take turns. Counted are samples per second, without the first round, and the memory of all processes
after the last commit: private pages, and shared ones by the number of processes that share them
(Pss). Linux only.

    python benchmarks/workers.py [--case lenet5] [--processes 2] [--rounds 5] [--turns 2] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from scale import install_plugin
from simulation_cases import CASES
from simulation_potluck import options

from potluck.deploy.local.demo_files import DemoFiles, reserved_port, write_demo_files
from potluck.deploy.local.local_federation import LocalFederation

WAYS = ("workers", "hosts")
_LOOK_SECONDS = 0.02


async def run(files: DemoFiles, clients: int) -> tuple[list[float], int]:
    """Return the seconds of each round but the first, and the memory of all processes in bytes."""
    commits: list[float] = []
    async with LocalFederation(files) as federation:
        await federation.start()
        async with federation.operator() as client:
            while True:
                if sum(each.attending for each in await client.list_clients()) == clients:
                    break
                await asyncio.sleep(_LOOK_SECONDS)
            run_id = await client.start_run(files.run_file)
            async for event in client.watch_run(run_id):
                if event.WhichOneof("event") == "committed":
                    commits.append(time.perf_counter())
                elif event.status.reason:
                    raise RuntimeError(event.status.reason)
        pids = {pid for each in federation.processes for pid in members(each.group)}
        memory = sum(map(proportional, pids))
    return [after - before for before, after in itertools.pairwise(commits)], memory


def members(parent: int) -> Iterator[int]:
    """Yield the ids of a process and of all its descendants."""
    yield parent
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{parent}/task").iterdir():
            for child in (thread / "children").read_text().split():
                yield from members(int(child))


def proportional(pid: int) -> int:
    """Return the proportional memory (Pss) of a process in bytes; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next(int(each.split()[1]) * 1024 for each in lines if each.startswith("Pss:"))


def measure(way: str, case: str, processes: int, rounds: int) -> dict[str, float]:
    """Run a federation. Return samples per second and megabytes (10^6 bytes)."""
    workers, hosts = (processes, 1) if way == "workers" else (1, processes)
    made = options(case, CASES[case], workers, rounds + 1, ["host_sums.enabled=false"])
    with tempfile.TemporaryDirectory(prefix="potluck-") as folder, reserved_port() as port:
        files = write_demo_files(Path(folder) / "f", replace(made, hosts=hosts), port)
        seconds, memory = asyncio.run(run(files, CASES[case].clients))
    speed = CASES[case].samples_per_round / statistics.median(seconds)
    return {"samples per second": speed, "MB": memory / 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=CASES, default="lenet5")
    parser.add_argument("--processes", type=int, default=2, help="processes that train")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds per turn")
    parser.add_argument("--turns", type=int, default=2, help="turns of each way")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    chosen = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    install_plugin()
    turns: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(chosen.turns):
        for way in WAYS:
            turns[way].append(measure(way, chosen.case, chosen.processes, chosen.rounds))
    found = {
        way: {key: statistics.median(each[key] for each in of) for key in of[0]}
        for way, of in turns.items()
    }
    if chosen.json:
        print(json.dumps(found))
        return
    for way, values in found.items():
        shown = ", ".join(f"{value:,.0f} {key}" for key, value in values.items())
        print(f"{chosen.case}, {chosen.processes} {way}: {shown}")
    for key in found["hosts"]:
        print(f"workers / hosts, {key}: {found['workers'][key] / found['hosts'][key]:.2f}")


if __name__ == "__main__":
    main()
