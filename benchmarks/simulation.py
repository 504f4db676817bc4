"""Simulated rounds on Potluck, bare PyTorch loops, pfl-research and Flower's simulation.

All systems use the same networks, clients, cohort sizes, local steps and FedAvg; nothing is
evaluated. They take turns on this machine. Peers are installed in their own virtual environments,
which the first run makes.

    python benchmarks/simulation.py
    python benchmarks/simulation.py --case lenet5 --only potluck --only bare_per_core --rounds 3
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import itertools
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers_environments import environment
from peers_processes import Programs, busy_seconds, processor_seconds, programs_in, until
from peers_work import Notes
from rich.console import Console
from rich.table import Table
from simulation_cases import CASES, cores

from potluck.common.errors import PotluckError
from potluck.deploy.local.demo_files import LOOPBACK, reserved_port

HERE = Path(__file__).parent
PFL, FLOWER, TORCH = "0.6.0", "1.34.0", "2.13.0"
SYSTEMS = (
    "potluck",
    "bare_one_process",
    "bare_per_core",
    "pfl_one_process",
    "pfl_per_core",
    "flower",
)
LOOK_SECONDS = 0.25


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Cost of a system's rounds in one turn, except the turn's first round.

    processor: processor seconds of all its processes, by round. elsewhere: mean number of
    processors busy with other work meanwhile. training: method of training clients, and the reason;
    Potluck only.
    """

    seconds: Sequence[float]
    processor: float
    elsewhere: float
    training: Mapping[str, str]


@dataclass
class Processor:
    """Processor time of a system's processes, and of the whole machine, over time."""

    programs: Programs
    samples: list[tuple[float, float]] = field(default_factory=list)
    machine: list[tuple[float, float]] = field(default_factory=list)

    async def sample(self) -> None:
        """Sample until cancelled."""
        while True:
            now = asyncio.get_running_loop().time()
            self.samples.append((now, processor_seconds(self.programs.pids())))
            self.machine.append((now, busy_seconds()))
            await asyncio.sleep(LOOK_SECONDS)

    def spent(self, begin: float, end: float) -> tuple[float, float]:
        """Return processor seconds between two times: the system's and the whole machine's."""
        ours = at(self.samples, end) - at(self.samples, begin)
        return ours, at(self.machine, end) - at(self.machine, begin)


def at(samples: Sequence[tuple[float, float]], moment: float) -> float:
    """Return the sampled value at a moment, interpolated linearly between two samples."""
    for (before, less), (after, more) in itertools.pairwise(samples):
        if before <= moment <= after:
            return less + (more - less) * (moment - before) / (after - before)
    return samples[-1][1]


async def commands(
    system: str, case: str, rounds: int, notes: Path, options: argparse.Namespace
) -> list[tuple[list[str], list[str]]]:
    """Return command and environment of each process of a system. Raises PotluckError."""
    processes = 1 if system.endswith("one_process") else options.processes
    told = [case, str(processes), str(rounds), str(notes)]
    scripts = HERE / "peers" / "simulation"
    if system == "potluck":
        return [([sys.executable, str(HERE / "simulation_potluck.py"), *told, *options.set], [])]
    found = [f"PYTHONPATH={HERE}"]
    if system.startswith("bare"):
        return [([sys.executable, str(scripts / "bare.py"), *told], found)]
    torch = (f"torch=={TORCH}", "numpy")
    if system == "flower":
        binaries = await environment(
            options.environments, "flwr", FLOWER, extra="simulation", others=torch
        )
        quiet = ["FLWR_TELEMETRY_ENABLED=0", "FLWR_DISABLE_UPDATE_CHECK=1"]
        ray = ["RAY_USAGE_STATS_ENABLED=0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0"]
        homes = [f"FLWR_HOME={notes.parent / 'flower'}", f"RAY_TMPDIR={options.short_folder}"]
        command = [str(binaries / "python"), str(scripts / "flower.py"), *told]
        return [(command, [*found, *quiet, *ray, *homes])]
    binaries = await environment(options.environments, "pfl", PFL, others=torch)
    command = [str(binaries / "python"), str(scripts / "pfl_research.py"), *told]
    if processes == 1:
        return [(command, found)]
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(reserved_port()) for _ in range(processes)]
    addresses = ",".join(f"{LOOPBACK}:{port}" for port in ports)
    return [
        (command, [*found, f"PFL_WORKER_ADDRESSES={addresses}", f"PFL_WORKER_RANK={rank}"])
        for rank in range(processes)
    ]


async def take_turn(system: str, case: str, options: argparse.Namespace, folder: Path) -> Turn:
    """Run some rounds of a case on a system. Raises PotluckError."""
    rounds = options.rounds + 1
    async with programs_in(folder) as programs:
        notes = Notes(folder / "notes")
        started = [
            await programs.start(f"{system}-{number}", command, settings)
            for number, (command, settings) in enumerate(
                await commands(system, case, rounds, notes.path, options)
            )
        ]
        processor = Processor(programs)
        sampling = asyncio.create_task(processor.sample())
        try:
            await until(
                lambda: len(notes.commits()) >= rounds,
                what=f"{rounds} rounds of {case} on {system}",
                patience=options.timeout,
                passing=started,
            )
            await asyncio.sleep(LOOK_SECONDS)  # wait for one more sample
        finally:
            sampling.cancel()
    commits = notes.commits()
    spent, everything = processor.spent(commits[0], commits[-1])
    return Turn(
        seconds=[after - before for before, after in itertools.pairwise(commits)],
        processor=spent / (len(commits) - 1),
        elsewhere=max(0.0, everything - spent) / (commits[-1] - commits[0]),
        training={
            name: str(note[name])
            for note in notes.read("trained")[:1]
            for name in ("way", "reason")
        },
    )


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all systems on all cases; report and skip those that fail."""
    folder = Path(tempfile.mkdtemp(prefix="potluck-simulation-"))
    # Paths of sockets have at most about a hundred characters, and Ray needs most of them.
    options.short_folder = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))
    turns: dict[tuple[str, str], list[Turn]] = {}
    failures: dict[str, str] = {}
    loads: list[float] = []
    try:
        for case, number in itertools.product(options.case or CASES, range(options.turns)):
            for system in options.only or SYSTEMS:
                what = f"{case}-{system}"
                if what in failures:
                    continue
                loads.append(os.getloadavg()[0])
                try:
                    turn = await take_turn(system, case, options, folder / f"{what}-{number}")
                except PotluckError as error:
                    failures[what] = str(error)
                    print(f"{what}: {error}; its logs are in {folder}", file=sys.stderr)
                    continue
                turns.setdefault((case, system), []).append(turn)
                shutil.rmtree(folder / f"{what}-{number}", ignore_errors=True)
                if not options.json:
                    median = statistics.median(turn.seconds)
                    print(f"{what}: {median:.3f} s a round", file=sys.stderr)
    finally:
        shutil.rmtree(options.short_folder, ignore_errors=True)
        if not failures:
            shutil.rmtree(folder, ignore_errors=True)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        "cores": cores(),
        "rounds": options.rounds,
        "turns": options.turns,
        "load_before": [min(loads), max(loads)] if loads else [],
        "cases": {case: figures(case, turns) for case in options.case or CASES},
        "failures": failures,
    }


def figures(case: str, turns: Mapping[tuple[str, str], Sequence[Turn]]) -> dict[str, Any]:
    """Return samples per second of each system, processor seconds per round, and ratios."""
    samples = CASES[case].samples_per_round
    speeds: dict[str, float] = {}
    processor: dict[str, float] = {}
    elsewhere: dict[str, float] = {}
    for system in SYSTEMS:
        found = turns.get((case, system), [])
        if found:
            seconds = statistics.median(each for turn in found for each in turn.seconds)
            speeds[system] = samples / seconds
            processor[system] = statistics.median(turn.processor for turn in found)
            elsewhere[system] = max(turn.elsewhere for turn in found)
    others = [speed for system, speed in speeds.items() if system not in ("potluck", "flower")]
    ours = speeds.get("potluck")
    return {
        **speeds,
        "processor_seconds_per_round": processor,
        "processors_busy_elsewhere": elsewhere,
        "training": [turn.training for turn in turns.get((case, "potluck"), [])],
        "samples_per_round": samples,
        "ratio_to_best": ours / max(others) if ours and others else None,
        "ratio_to_flower": ours / speeds["flower"] if ours and "flower" in speeds else None,
    }


def show(result: Mapping[str, Any]) -> None:
    """Print a table: a row for each case and system."""
    table = Table(title=f"{result['rounds']} rounds in each of {result['turns']} turns")
    for column in (
        "case",
        "system",
        "samples/s",
        "processor s / round",
        "potluck / this",
        "busy elsewhere",
    ):
        table.add_column(column, justify="left" if column in ("case", "system") else "right")
    for case, found in result["cases"].items():
        for system in SYSTEMS:
            if system in found:
                spent = found["processor_seconds_per_round"][system]
                ratio = f"{found['potluck'] / found[system]:.2f}" if "potluck" in found else ""
                speed, others = f"{found[system]:,.0f}", found["processors_busy_elsewhere"][system]
                table.add_row(case, system, speed, f"{spent:.2f}", ratio, f"{others:.2f}")
    Console().print(table)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--case", action="append", choices=list(CASES), help="case to run; default: all"
    )
    parser.add_argument(
        "--only", action="append", choices=SYSTEMS, help="system to run; default: all"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=5,
        help="number of measured rounds per turn, after the first round",
    )
    parser.add_argument("--turns", type=int, default=2, help="number of turns per system")
    parser.add_argument(
        "--processes",
        type=int,
        default=cores(),
        help="number of worker processes (default: one per core)",
    )
    parser.add_argument(
        "-o",
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a key of Potluck's run file, e.g. training.epochs=2",
    )
    parser.add_argument(
        "--environments",
        type=Path,
        default=Path("~/.cache/potluck-peers"),
        help="folder of the other frameworks' virtual environments (default: %(default)s)",
    )
    parser.add_argument("--timeout", type=float, default=900.0, help="maximum seconds per turn")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    options.environments = options.environments.expanduser().absolute()
    if min(options.rounds, options.turns, options.processes) < 1:
        parser.error("--rounds, --turns and --processes must be positive")
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
        else:
            show(result)
        return 1 if result["failures"] else 0
    print("interrupted; all processes have been ended", file=sys.stderr)
    return 130


if __name__ == "__main__":
    sys.exit(main())
