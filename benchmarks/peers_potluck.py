"""Run the benchmark's work on Potluck with `round.py`, measured as on the other frameworks."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from importlib.metadata import version
from pathlib import Path

from peers_memory import Memory, processes_of
from peers_processes import programs_in, until
from peers_work import Measurement, Work

BENCHMARK = Path(__file__).parent / "round.py"


def command(work: Work) -> list[str]:
    """Return the command line of `round.py`."""
    sizes = ["--clients", str(work.clients), "--megabytes", str(work.megabytes)]
    settings = [part for setting in work.transport for part in ("-o", setting)]
    return [sys.executable, str(BENCHMARK), *sizes, "--rounds", str(work.rounds), *settings]


async def measure(folder: Path, work: Work) -> Measurement:
    """Run the work on Potluck. Raises RunError."""
    async with programs_in(folder) as programs:
        process = await programs.start("round", [*command(work), "--json"])
        memory = Memory(lambda: processes_of("potluck-server", [process.group]))
        ended = asyncio.create_task(process.ended())
        async with memory.sampled():
            await until(ended.done, what="round.py", patience=work.timeout, passing=[process])
        figures = json.loads(programs.log("round").splitlines()[-1])
    peak, by_process = memory.peak(0.0, math.inf)
    return Measurement(
        version=version("potluck"),
        transport=" ".join(["gRPC with mTLS", *work.transport]),
        seconds_median=figures["seconds_median"],
        seconds_min=figures["seconds_min"],
        launch_to_first_round=figures["launch_to_first_round_seconds"],
        submit_to_first_round=figures["first_round_seconds"],
        server_peak=peak,
        server_private=int(figures["coordinator_private_mb"] * 1e6),
        server_peak_by_process=by_process,
        bytes_per_client=figures["bytes_per_client"],
    )
