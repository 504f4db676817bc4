"""Training on a file of samples that is larger than a host's memory: it is read during training.

A coordinator and a host run on this machine, with one client. The task's own trainer makes one pass
over a file of samples, a batch at a time. The file is sparse: its samples are zeros, which take as
much memory when read as other samples. Memory is RssAnon, the private pages that the kernel can't
drop, of the whole host process, compared with a process that has only imported torch.

    python benchmarks/streamed_data.py --gigabytes 10
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import tomlkit
from memory import PeakMemory
from rich.console import Console
from rich.table import Table
from scale import install_plugin

from potluck.deploy.local.demo_files import DemoFiles, DemoOptions, reserved_port, write_demo_files
from potluck.deploy.local.local_federation import LocalFederation

_SAMPLE_BYTES = 4096
_MOST_BYTES = 1 << 30
_TORCH = """
import torch
print(next(l.split()[1] for l in open("/proc/self/status") if l.startswith("RssAnon")))
"""


def torch_bytes() -> int:
    """Return the private memory of a process that has only imported torch."""
    told = subprocess.run([sys.executable, "-c", _TORCH], check=True, capture_output=True)
    return int(told.stdout) * 1024


async def run(files: DemoFiles) -> tuple[float, PeakMemory]:
    """Return the seconds of the round, and the peak memory."""
    async with LocalFederation(files) as federation:
        await federation.start()
        peaks = PeakMemory(federation)
        watching = asyncio.create_task(peaks.watch())
        begun = time.perf_counter()
        try:
            async with federation.operator() as client:
                run_id = await client.start_run(files.run_file)
                async for event in client.watch_run(run_id):
                    if event.WhichOneof("event") == "committed":
                        return time.perf_counter() - begun, peaks
                    if event.status.reason:
                        raise RuntimeError(event.status.reason)
        finally:
            watching.cancel()
    raise RuntimeError("the run ended without a round")


def measure(gigabytes: float) -> dict[str, Any]:
    """Run one round. Return its costs."""
    install_plugin()
    size = int(gigabytes * 1e9) // _SAMPLE_BYTES * _SAMPLE_BYTES
    options = DemoOptions(
        task="streamed",
        selector="uniform",
        strategy="fedavg",
        clients=1,
        hosts=1,
        count=1,
        rounds=1,
        seed=1,
        device="cpu",
        assignments=["round.deadline_seconds=3600.0"],
    )
    with tempfile.TemporaryDirectory(prefix="potluck-streamed-") as name, reserved_port() as port:
        data = Path(name) / "data"
        data.mkdir()
        with (data / "samples.bin").open("wb") as file:
            file.truncate(size)
        files = write_demo_files(Path(name) / "f", options, port)
        for path in files.hosts:
            values = tomlkit.parse(path.read_text())
            path.write_text(tomlkit.dumps({"data_directory": str(data)}) + tomlkit.dumps(values))
        seconds, peaks = asyncio.run(run(files))
    peak, alone = peaks.of(hosts=True), torch_bytes()
    return {
        "gigabytes": size / 1e9,
        "seconds": seconds,
        "host_megabytes": peak / 1e6,
        "torch_megabytes": alone / 1e6,
        "beyond_torch_megabytes": (peak - alone) / 1e6,
        "within_bound": peak - alone <= _MOST_BYTES,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=10.0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    result = measure(options.gigabytes)
    if options.json:
        print(json.dumps(result))
        return
    table = Table(title=f"one pass over {result['gigabytes']:.1f} GB of samples on disk")
    table.add_column("what")
    table.add_column("value", justify="right")
    table.add_row("seconds of the round", f"{result['seconds']:.0f}")
    table.add_row("the host's private memory", f"{result['host_megabytes']:.0f} MB")
    table.add_row("a process with torch alone", f"{result['torch_megabytes']:.0f} MB")
    table.add_row("beyond torch", f"{result['beyond_torch_megabytes']:.0f} MB")
    Console().print(table)


if __name__ == "__main__":
    main()
