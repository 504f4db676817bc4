"""Run the same work on Potluck, Flower and NVFlare, on this machine, one after another.

The work: FedAvg with N clients, all selected in every round. Each receives and returns a model of M
megabytes (10^6 bytes) of float32, and trains nothing. Flower and NVFlare run as their own
documentation deploys them, each in a virtual environment of its own, which the first run makes.

    python benchmarks/peers.py --clients 10 --megabytes 9 --rounds 5
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peers_flower
import peers_nvflare
import peers_potluck
from peers_environments import environment
from peers_work import Measurement, Work
from rich.console import Console
from rich.table import Table

from potluck.common.errors import PotluckError

FLOWER = "1.34.0"
"""Flower's version: uses gRPC everywhere, like all versions up to 1.36; from 1.40 on it uses HTTP.
"""
NVFLARE = "2.9.0"
SYSTEMS = ("potluck", "flower", "nvflare")
COMPARED = (
    "seconds_median",
    "seconds_min",
    "launch_to_first_round_seconds",
    "server_private_mb",
    "server_peak_mb",
    "bytes_per_client",
)


async def measure(system: str, folder: Path, options: argparse.Namespace) -> Measurement:
    """Run one system. Raises PotluckError."""
    work = Work(
        clients=options.clients,
        megabytes=options.megabytes,
        rounds=options.rounds,
        transport=tuple(options.set),
        timeout=options.timeout,
    )
    if system == "flower":
        version = options.flower_version
        peers_flower.check(version)
        binaries = await environment(options.environments, "flwr", version)
        return await peers_flower.measure(folder, binaries, version, work)
    if system == "nvflare":
        version = options.nvflare_version
        binaries = await environment(options.environments, "nvflare", version)
        return await peers_nvflare.measure(folder, binaries, version, work)
    return await peers_potluck.measure(folder, work)


def plain(measured: Measurement) -> dict[str, Any]:
    """Return the object that `--json` prints."""
    return {
        "version": measured.version,
        "transport": measured.transport,
        "seconds_median": measured.seconds_median,
        "seconds_min": measured.seconds_min,
        "launch_to_first_round_seconds": measured.launch_to_first_round,
        "submit_to_first_round_seconds": measured.submit_to_first_round,
        "server_peak_mb": measured.server_peak / 1e6,
        "server_private_mb": measured.server_private / 1e6,
        "server_peak_mb_by_process": {
            name: size / 1e6 for name, size in measured.server_peak_by_process.items()
        },
        "bytes_per_client": measured.bytes_per_client,
    }


def ratios(systems: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return each peer's numbers divided by Potluck's."""
    ours = systems.get("potluck")
    if ours is None:
        return {}
    return {
        name: {key: figures[key] / ours[key] for key in COMPARED if figures[key] and ours[key]}
        for name, figures in systems.items()
        if name != "potluck"
    }


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all requested systems; report and skip those that fail."""
    systems: dict[str, dict[str, Any]] = {}
    failures: dict[str, str] = {}
    loads: dict[str, float] = {}
    folder = Path(tempfile.mkdtemp(prefix="potluck-peers-"))
    try:
        for system in options.only or SYSTEMS:
            loads[system] = os.getloadavg()[0]
            try:
                systems[system] = plain(await measure(system, folder / system, options))
            except PotluckError as error:
                failures[system] = str(error)
                kept = f"; its logs are in {folder / system}" if (folder / system).exists() else ""
                print(f"{system}: {error}{kept}", file=sys.stderr)
    finally:
        clean(folder, keep=bool(failures))
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        "cores": os.cpu_count(),
        "load_before": loads,
        "clients": options.clients,
        "megabytes": options.megabytes,
        "rounds": options.rounds,
        "potluck_settings": options.set,
        "systems": systems,
        "ratios": ratios(systems),
        "failures": failures,
    }


def clean(folder: Path, *, keep: bool) -> None:
    """Remove the folder; if `keep`, only if it is empty."""
    if not keep or not any(folder.iterdir()):
        shutil.rmtree(folder, ignore_errors=True)


def show(result: Mapping[str, Any]) -> None:
    """Print a table with a column per system; those of other systems have ratios to Potluck."""
    systems = result["systems"]
    size = f"{result['clients']} clients, {result['megabytes']:g} MB, no training"
    table = Table(title=f"{size} (peer / Potluck in brackets)")
    table.add_column("what")
    for name, figures in systems.items():
        table.add_column(f"{name} {figures['version']}", justify="right")
    for what, key, form in (
        ("seconds per round, median", "seconds_median", "{:.3f}"),
        ("seconds per round, least", "seconds_min", "{:.3f}"),
        ("launch → first round, s", "launch_to_first_round_seconds", "{:.2f}"),
        ("submitted → first round, s", "submit_to_first_round_seconds", "{:.2f}"),
        ("server's memory above idle, MB", "server_private_mb", "{:.1f}"),
        ("server's memory at its peak, MB", "server_peak_mb", "{:.1f}"),
        ("bytes per client and round", "bytes_per_client", "{:.0f}"),
    ):
        cells = []
        for name, figures in systems.items():
            value = "–" if figures[key] is None else form.format(figures[key])
            ratio = result["ratios"].get(name, {}).get(key)
            cells.append(f"{value} ({ratio:.1f} ×)" if ratio else value)
        table.add_row(what, *cells)
    console = Console()
    console.print(table)
    for name, figures in systems.items():
        parts = figures["server_peak_mb_by_process"].items()
        peaks = ", ".join(f"{process} {size:.0f} MB" for process, size in parts)
        console.print(f"{name}: {figures['transport']}; {peaks}", soft_wrap=True)
    loads = ", ".join(f"{load:.1f} before {name}" for name, load in result["load_before"].items())
    console.print(f"load average on {result['cores']} cores: {loads}", soft_wrap=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--megabytes", type=float, default=9.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--only", action="append", choices=SYSTEMS, help="system to run; repeatable; default: all"
    )
    parser.add_argument(
        "-o",
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting of Potluck's run file, e.g. transport.up.encoding=int8; "
        "the other frameworks always send float32",
    )
    parser.add_argument(
        "--environments",
        type=Path,
        default=Path("~/.cache/potluck-peers"),
        help="folder of the peers' virtual environments (default: %(default)s)",
    )
    parser.add_argument("--flower-version", default=FLOWER)
    parser.add_argument("--nvflare-version", default=NVFLARE)
    parser.add_argument("--timeout", type=float, default=900.0, help="maximum seconds per system")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    options.environments = options.environments.expanduser().absolute()
    if min(options.clients, options.rounds, options.megabytes * 1e6 / 4) < 1:
        parser.error("--clients, --rounds and --megabytes must be positive")
    return options


async def until_interrupted(options: argparse.Namespace) -> dict[str, Any]:
    """Call `run`; on SIGTERM or Ctrl-C, end all processes that it started."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await run(options)


def main() -> int:
    options = arguments()
    with contextlib.suppress(asyncio.CancelledError, KeyboardInterrupt):
        result = asyncio.run(until_interrupted(options))
        if options.json:
            print(json.dumps(result))
        elif result["systems"]:
            show(result)
        return 1 if result["failures"] else 0
    print("interrupted; all processes have been ended", file=sys.stderr)
    return 130


if __name__ == "__main__":
    sys.exit(main())
