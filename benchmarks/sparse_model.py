"""Private memory in rounds of a model of many gigabytes; the coordinator is killed after round 1.

A coordinator and two hosts run on this machine, one client each. The model's tensors are zeros,
except a tiny classifier, the only part that is trained. All files of the model are sparse, so that
a machine with little disk space can run it. The number of bytes copied, hashed, checked and reduced
is that of any model of this size. Memory is RssAnon, the private pages that the kernel can't drop,
of the whole process.

    python benchmarks/sparse_model.py --gigabytes 6
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import tomlkit
from memory import PeakMemory
from rich.console import Console
from rich.table import Table
from scale import install_plugin

from potluck.common.errors import PotluckError
from potluck.deploy.local.demo_files import DemoFiles, DemoOptions, reserved_port, write_demo_files
from potluck.deploy.local.local_federation import LocalFederation, kill

_LOOK_SECONDS = 0.05
_ROUNDS = 2


def allow(files: DemoFiles, size: int) -> None:
    """Allow models of `size` bytes in all processes, and space for one on each host."""
    for path in (files.coordinator, *files.hosts):
        values = tomlkit.parse(path.read_text())
        limits: dict[str, int] = {"maximum_model_bytes": size}
        if path != files.coordinator:
            limits["cached_models"] = 1
        head = tomlkit.dumps(limits)
        path.write_text(head + tomlkit.dumps(values))


async def run(files: DemoFiles, hosts: int) -> tuple[list[float], PeakMemory, str]:
    """Return the seconds from start to each commit, the peak memory, and the model's digest."""
    async with LocalFederation(files) as federation:
        await federation.start()
        peaks = PeakMemory(federation)
        watching = asyncio.create_task(peaks.watch())
        begun, times = time.perf_counter(), []
        async with federation.operator() as client:
            while True:
                if sum(each.attending for each in await client.list_clients()) == hosts:
                    break
                await asyncio.sleep(_LOOK_SECONDS)
            run_id = await client.start_run(files.run_file)
            async for event in client.watch_run(run_id):
                if event.WhichOneof("event") == "committed":
                    times.append(time.perf_counter() - begun)
                    break
                if event.status.reason:
                    raise RuntimeError(event.status.reason)
        assert federation.coordinator is not None
        await kill(federation.coordinator)
        await federation.start_coordinator()
        await federation.until_ready()
        digest = ""
        async with federation.operator() as client:
            with contextlib.suppress(PotluckError):  # the stream ends with the run
                async for event in client.watch_run(run_id):
                    if event.WhichOneof("event") == "committed" and event.committed.round > 1:
                        times.append(time.perf_counter() - begun)
                        digest = event.committed.model_blake3
                        break
                    if event.status.reason:
                        raise RuntimeError(event.status.reason)
        watching.cancel()
    return times, peaks, digest


def disk(folder: Path) -> int:
    """Return the bytes of disk that the files of a folder take."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))


def measure(gigabytes: float, tensors: int, assignments: list[str]) -> dict[str, Any]:
    """Run one federation. Return the costs of its rounds."""
    install_plugin()
    size = int(gigabytes * 1e9)
    options = DemoOptions(
        task="sparse",
        selector="uniform",
        strategy="fedavg",
        clients=2,
        hosts=2,
        count=2,
        rounds=_ROUNDS,
        seed=1,
        device="cpu",
        assignments=[
            f"task.parameters={size // 4}",
            f"task.tensors={tensors}",
            "training.steps=1",
            "round.deadline_seconds=3600.0",
            "retention.keep_last=1",
            *assignments,
        ],
    )
    with tempfile.TemporaryDirectory(prefix="potluck-sparse-") as name, reserved_port() as port:
        files = write_demo_files(Path(name) / "f", options, port)
        allow(files, size + (1 << 20))
        times, peaks, digest = asyncio.run(run(files, 2))
        taken = disk(Path(name))
    return {
        "gigabytes": gigabytes,
        "seconds": [after - before for before, after in itertools.pairwise([0.0, *times])],
        "coordinator_megabytes": peaks.of(hosts=False) / 1e6,
        "host_models": peaks.of(hosts=True) / size,
        "disk_gigabytes": taken / 1e9,
        "model": digest,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=6.0)
    parser.add_argument("--tensors", type=int, default=20)
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
    result = measure(options.gigabytes, options.tensors, options.set)
    if options.json:
        print(json.dumps(result))
        return
    table = Table(title=f"a model of {options.gigabytes:g} GB, 2 hosts, a killed coordinator")
    table.add_column("what")
    table.add_column("value", justify="right")
    for number, seconds in enumerate(result["seconds"], 1):
        table.add_row(f"round {number}", f"{seconds:.0f} s")
    table.add_row("coordinator's private memory", f"{result['coordinator_megabytes']:.0f} MB")
    table.add_row("a host's private memory / model", f"{result['host_models']:.2f}")
    table.add_row("disk at the end", f"{result['disk_gigabytes']:.2f} GB")
    Console().print(table)


if __name__ == "__main__":
    main()
