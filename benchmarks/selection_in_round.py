"""Time that the selection adds to a round of a run.

    python benchmarks/selection_in_round.py --clients 1000 --clients-per-round 100 --json

Prints milliseconds by selector for these parts: checking if a client still has to disclose
something, building the population from stored profiles, choosing, checking the choice, observing,
and writing the selector's state to disk. `--cpu` counts processor time instead, for a busy machine.
All parts are the coordinator's own, and each time is the median of some rounds. Not counted: the
other work of a round, which every selector has, and clients' answers to a selector's questions.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from potluck.common.disclosure import Parameters, TaskReference
from potluck.common.signal import signal_named
from potluck.server.eligibility.collected_sums import LabelSums
from potluck.server.eligibility.eligibility import Eligibility
from potluck.server.eligibility.host_checks import HostChecks
from potluck.server.eligibility.left_out import LeftOutRegister
from potluck.server.eligibility.picks import PickRecord
from potluck.server.hosts.attendance import Attendance
from potluck.server.live.models import States, write_states
from potluck.server.machine.events import Select
from potluck.server.machine.roster import RunRoster
from potluck.server.plan.plan import RunPlan, draw_up
from potluck.server.profiles.collect import Profiling
from potluck.server.profiles.trust import Trust
from potluck.server.select.selection_checks import check_selection
from potluck.server.selection import Population, RoundOutcome, Selection, SelectionContext
from potluck.server.state import State
from potluck.server.store.model_files import ModelFiles
from potluck.server.store.records import Profile

NAMES = (
    "uniform",
    "round-robin",
    "feddiverse",
    "known-matrix",
    "fedentopt",
    "kl",
    "dc-real",
    "dc-balanced",
    "dc-random",
)
BUDGET_MILLISECONDS = 5.0
_AT = datetime(2026, 1, 1, tzinfo=UTC)
_ROUNDS = 15


def plan_of(name: str, count: int) -> RunPlan:
    """Return the plan of a run with this selector."""
    options = f"added = {count // 2}\n" if name.startswith("dc-") else ""
    task = '[task]\nname = "colored-digits"\n'
    text = f'clients_per_round = {count}\n{task}[selector]\nname = "{name}"\n'
    return draw_up(text + options, source="benchmark")


def stored_profiles(plan: RunPlan, clients: list[str]) -> list[Profile]:
    """Return the profiles that clients would have disclosed for that run."""
    generator = np.random.default_rng(0)
    task = plan.run_file.task
    classes = plan.task.classes
    profiles = []
    for signal in sorted(plan.selector.needs_profiles):
        request = signal_named(signal).request(plan.run_file.profiles)
        noisy = request.mode.adds_noise
        parameters = Parameters(
            mode=request.mode,
            task=TaskReference(name=task.name, options=task.options),
            epsilon=1.0 if noisy else None,
            adjacency="replace" if noisy else None,
            settings=request.settings,
        ).canonical()
        for client in clients:
            payload: dict[str, Any] = {
                "label_counts": {"label_counts": generator.integers(0, 99, classes).tolist()},
                "triplet": {"triplet": generator.random(3).tolist(), "degenerate": False},
                "interaction_matrix": {
                    "interaction_matrix": generator.integers(0, 99, (classes, 2)).tolist()
                },
            }[str(signal)]
            profiles.append(
                Profile(
                    client_id=client,
                    data_epoch=1,
                    signal=str(signal),
                    parameters_json=parameters,
                    payload_json=json.dumps(payload),
                    signature=None,
                    received_at=_AT,
                )
            )
    return profiles


@dataclass(frozen=True)
class _Stored:
    """A store with only profiles, in memory: writing thousands to a database would take longest."""

    held: Sequence[Profile]

    def profiles(self, *, signal: str, **_: object) -> list[Profile]:
        """Return the profiles of a signal."""
        return [profile for profile in self.held if profile.signal == signal]


async def milliseconds(
    name: str, clients: int, count: int, folder: Path, *, cpu: bool = False
) -> float:
    """Return the median milliseconds of selection over some successive rounds."""
    ids = [f"client-{number:06}" for number in range(clients)]
    plan = plan_of(name, count)
    files = ModelFiles(folder)
    stored = stored_profiles(plan, ids)

    async def in_store(call: Callable[[Any], Any]) -> Any:
        return call(_Stored(stored))

    trust = Trust(federation="f")
    attendance = Attendance(time.monotonic)
    roster = RunRoster(ids)
    roster.note_samples(dict.fromkeys(ids, 100))
    profiling = Profiling("r", plan, roster, attendance, in_store, trust)
    left_out = LeftOutRegister("r", plan, attendance, in_store, lambda _: None)
    eligibility = Eligibility(
        plan=plan,
        roster=roster,
        profiling=profiling,
        picks=PickRecord(roster),
        checks=HostChecks("r", plan, b"", attendance, left_out, lambda: False),
        left_out=left_out,
        label_sums=LabelSums(),
        warn=lambda _: None,
        post=lambda _: None,
    )
    await profiling.admit(ids)

    def population() -> Population:
        return profiling.population(limits=plan.run_file.sample_limits)

    state = plan.selector.init(population())
    clock = time.process_time if cpu else time.perf_counter
    times = []
    for number in range(1, _ROUNDS + 1):
        begin = clock()
        action = Select(number, 1, tuple(ids), count)
        rows = await eligibility.eligible(action, lambda _: True)
        context = SelectionContext(
            round=number, seed=1, count=count, population=population(), available=rows
        )
        selection = plan.selector.select(state, context)
        assert isinstance(selection, Selection)
        check_selection(selection, context, name)
        outcome = RoundOutcome(
            round=number,
            selected=selection.rows,
            included=selection.rows,
            seconds=np.ones(len(selection.rows)),
        )
        state = plan.selector.observe(state, outcome)
        write_states(files, States(selector=state, strategy=State()))
        eligibility.picks.add([ids[row] for row in selection.rows.tolist()])
        times.append(clock() - begin)
    return 1000 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description="Milliseconds that selecting adds to a round.")
    parser.add_argument(
        "--clients", type=int, default=1000, help="number of clients (default: 1000)"
    )
    parser.add_argument(
        "--clients-per-round",
        type=int,
        default=100,
        help="number of clients selected per round (default: 100)",
    )
    parser.add_argument(
        "--selector", action="append", choices=NAMES, help="selector to measure; default: all"
    )
    parser.add_argument(
        "--cpu", action="store_true", help="measure processor time instead of elapsed time"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    arguments = parser.parse_args()
    found = {}
    for name in arguments.selector or NAMES:
        with tempfile.TemporaryDirectory() as folder:
            found[name] = asyncio.run(
                milliseconds(
                    name,
                    arguments.clients,
                    arguments.clients_per_round,
                    Path(folder),
                    cpu=arguments.cpu,
                )
            )
    if arguments.json:
        print(json.dumps({"milliseconds": found, "budget": BUDGET_MILLISECONDS}))
        return
    print(
        f"ms added to a round with {arguments.clients:,} clients (budget {BUDGET_MILLISECONDS:g})"
    )
    for name, value in found.items():
        print(f"{name:14}{value:8.2f}")


if __name__ == "__main__":
    main()
