"""A case of `simulation.py` on Potluck: CASE WORKERS ROUNDS NOTES [KEY=VALUE …].

Runs a federation of real processes with mutual TLS, as `potluck demo` starts it: a coordinator and
a host. The host has WORKERS worker processes with one thread each, which share the clients.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from scale import install_plugin
from simulation_cases import CASES, Case, RoundNotes

from potluck.deploy.local.demo_files import (
    DemoFiles,
    DemoOptions,
    reserved_port,
    write_demo_files,
)
from potluck.deploy.local.local_federation import LocalFederation

LOOK_SECONDS = 0.02


def options(
    name: str, case: Case, workers: int, rounds: int, assignments: Sequence[str]
) -> DemoOptions:
    """Return the options of a case's run."""
    return DemoOptions(
        task="simulated",
        selector="uniform",
        strategy="fedavg",
        clients=case.clients,
        hosts=1,
        workers=workers,
        count=case.count,
        rounds=rounds,
        seed=1,
        device="cpu",
        assignments=[
            f"task.case={name}",
            f"training.batch_size={case.batch_size}",
            f"training.epochs={case.epochs}",
            f"training.learning_rate={case.learning_rate}",
            "training.batched=auto",
            "host_sums.enabled=true",
            "evaluation.every=0",
            "round.deadline_seconds=3600",
            *assignments,
        ],
    )


async def run(files: DemoFiles, clients: int, notes: RoundNotes) -> None:
    """Run the federation's run to its end. Raises RuntimeError if it fails."""
    said = False
    async with LocalFederation(files) as federation:
        await federation.start()
        async with federation.operator() as client:
            while True:
                if sum(each.attending for each in await client.list_clients()) == clients:
                    break
                await asyncio.sleep(LOOK_SECONDS)
            run_id = await client.start_run(files.run_file)
            async for event in client.watch_run(run_id):
                if event.WhichOneof("event") == "committed":
                    if not said:
                        said = True
                        notes.trained(*ways(files.log("host-0").read_text()))
                    notes.committed()
                elif event.status.reason:
                    raise RuntimeError(event.status.reason)


def main() -> None:
    name, workers, rounds, path, *assignments = sys.argv[1:]
    install_plugin()
    os.environ["OMP_NUM_THREADS"] = "1"
    case = CASES[name]
    made = options(name, case, int(workers), int(rounds), assignments)
    with tempfile.TemporaryDirectory(prefix="potluck-") as folder, reserved_port() as port:
        files = write_demo_files(Path(folder) / "f", made, port)
        asyncio.run(run(files, case.clients, RoundNotes(path)))


def ways(log: str) -> tuple[str, str]:
    """Return how a host trained its clients, and the reason, from its log."""
    way = "batched" if "trained in one batched step" in log else "one by one"
    found = re.findall(r"a step takes a client [^'\"]+ in a batched one", log)
    found += re.findall(r"clients are trained one by one .*reason=['\"]([^'\"]+)", log)
    return way, found[0] if found else ""


if __name__ == "__main__":
    main()
