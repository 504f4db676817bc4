"""Share of fast clients with clean labels in the cohorts of FLASH, compared with uniform selection.

A federation of real processes learns digits. Some clients' labels are wrong. The time a client
takes is simulated: shifted-exponential seconds per sample, drawn once for each client, or in each
round with `--draw round`. A client is fast if its mean time is at most that of the median client.
Each seed has another partition, other noise and other durations.

    python benchmarks/flash.py [--seeds 5] [--rounds 60] [--draw client] [--tail 10] [--json]

It also prints the inputs from which the bandit learns: the change of clients' robust losses in the
rounds in which they trained; the losses of all clients in the last 20 rounds, as a ratio to each
client's first loss; and the slope of the changes over these ratios. `pooled` is the slope over all
rounds together, as the bandit sees them; `within` is the slope within a round, which would
distinguish clients from each other.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from potluck.common.learning.virtual_clock import VirtualClock, pace
from potluck.common.names import ClientId
from potluck.common.tasks.digits import Digits
from potluck.common.tasks.label_noise import noise_rates
from potluck.deploy.local.demo_files import DemoOptions, reserved_port, write_demo_files
from potluck.deploy.local.local_federation import LocalFederation
from potluck.deploy.operator.operator_client import OperatorClient
from potluck.deploy.operator.run_overrides import override
from potluck.server.store import Store

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

ARMS: dict[str, Sequence[str]] = {
    "uniform": ['selector.name="uniform"'],
    "flash": ['selector.name="flash"'],
    "flash signed": ['selector.name="flash"', 'selector.reward="signed"'],
    "flash raw": ['selector.name="flash"', 'selector.scale="raw"'],
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Parameters of the simulation."""

    clients: int
    count: int
    rounds: int
    noise: float
    noisy: float
    clock: VirtualClock

    def task(self, seed: int) -> Digits:
        return Digits(
            clients=self.clients, seed=seed, label_noise=self.noise, noisy_clients=self.noisy
        )

    def assignments(self, seed: int) -> list[str]:
        """Return the assignments that adapt the run file to a seed."""
        return [
            f"seed={seed}",
            f"task.seed={seed}",
            f"task.label_noise={self.noise}",
            f"task.noisy_clients={self.noisy}",
            "virtual_clock.enabled=true",
            f"virtual_clock.tail_per_sample={self.clock.tail_per_sample}",
            f'virtual_clock.draw="{self.clock.draw}"',
        ]

    def kinds(self, seed: int) -> tuple[Flags, Flags]:
        """Return which clients have clean labels, and which are fast: one flag per client."""
        task = self.task(seed)
        names = [ClientId(f"client-{client}") for client in range(self.clients)]
        seconds = np.array([len(task.client_data(name, None).train) for name in names], dtype=float)
        if self.clock.draw == "client":
            seconds *= [pace(self.clock, seed=seed, client=n, round_number=1) for n in names]
        return noise_rates(task, self.clients, seed) == 0, seconds <= np.median(seconds)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of one run. Shares are of the cohorts; `expected` is of the whole federation.

    The other fields are explained in the module's docstring.
    """

    arm: str
    seed: int
    fast_and_clean: float
    fast_and_clean_late: float
    expected: float
    fast: float
    clean: float
    simulated_hours: float
    accuracy: float
    moved_clean: float | None = None
    moved_noisy: float | None = None
    ratio_clean: float | None = None
    ratio_noisy: float | None = None
    slope_pooled: float | None = None
    slope_within: float | None = None


async def played(client: OperatorClient, text: str) -> tuple[str, list[Any]]:
    """Run a run file to its end. Return the run's id and its committed rounds."""
    run_id = await client.start_run(text)
    rounds: list[Any] = []
    async for event in client.watch_run(run_id):
        if event.WhichOneof("event") == "committed":
            rounds.append(event.committed)
            print(f"\r{run_id}: {len(rounds)} rounds ", end="", file=sys.stderr, flush=True)
        elif event.status.reason:
            raise RuntimeError(event.status.reason)
    print(file=sys.stderr)
    return run_id, rounds


def measured(arm: str, seed: int, setting: Setting, rounds: list[Any], told: Floats) -> Outcome:
    """Return the outcome of a run.

    told: robust losses, rounds × clients, NaN for clients that were not asked.
    """
    clean, fast = setting.kinds(seed)
    picked = np.zeros((len(rounds), setting.clients), dtype=bool)
    for row, committed in enumerate(rounds):
        picked[row, [int(m.client_id.removeprefix("client-")) for m in committed.members]] = True

    def share(kind: Flags, chosen: Flags) -> float:
        return float(chosen[:, kind].sum() / chosen.sum())

    return Outcome(
        arm=arm,
        seed=seed,
        fast_and_clean=share(clean & fast, picked),
        fast_and_clean_late=share(clean & fast, picked[-20:]),
        expected=float((clean & fast).mean()),
        fast=share(fast, picked),
        clean=share(clean, picked),
        simulated_hours=sum(committed.seconds for committed in rounds) / 3600,
        accuracy=rounds[-1].metrics.accuracy,
        **(learned_from(told, picked, clean) if np.isfinite(told).any() else {}),
    )


def learned_from(told: Floats, picked: Flags, clean: Flags) -> dict[str, float]:
    """Return the fields of `Outcome` about losses: mean changes, ratios and slopes."""
    moved = np.abs(np.diff(told, axis=0))
    ratio = (told / told[0])[:-1]
    chosen = picked[:-1] & np.isfinite(moved)
    within = [
        (ratio[row, mine] - ratio[row, mine].mean(), moved[row, mine] - moved[row, mine].mean())
        for row, mine in enumerate(chosen)
    ]
    x, y = (np.concatenate(each) for each in zip(*within, strict=True))
    pooled_x, pooled_y = ratio[chosen], moved[chosen]
    return {
        "moved_clean": float(moved[chosen & clean].mean()),
        "moved_noisy": float(moved[chosen & ~clean].mean()),
        "ratio_clean": float(np.nanmean(ratio[-20:, clean])),
        "ratio_noisy": float(np.nanmean(ratio[-20:, ~clean])),
        "slope_pooled": float(np.polyfit(pooled_x, pooled_y, 1)[0]),
        "slope_within": float((x @ y) / (x @ x)),
    }


def losses_told(store: Store, run_id: str, setting: Setting) -> Floats:
    """Return the robust losses that clients reported: rounds × clients, NaN if not asked."""
    numbers = np.array([int(each.removeprefix("client-")) for each in store.roster(run_id)])
    told = np.full((setting.rounds, setting.clients), np.nan)
    for row, committed in enumerate(store.rounds(run_id)):
        for exchange in store.answers(committed.key):
            answers: Any = exchange.answers
            told[row, numbers[answers["rows"]]] = answers["values"]["robust"]
    return told


async def measure(setting: Setting, arms: Sequence[str], seeds: int, folder: Path) -> list[Outcome]:
    options = DemoOptions(
        task="digits",
        selector="uniform",
        strategy="fedavg",
        clients=setting.clients,
        hosts=2,
        count=setting.count,
        rounds=setting.rounds,
        seed=0,
        device="cpu",
        assignments=[
            'objective.name="noise-robust"',
            f"expected_clients={setting.clients}",
            "training.validation_share=0.1",
            f"evaluation.every={setting.rounds}",
        ],
        disclosure={"questions": ["context"]},
    )
    runs: list[tuple[str, int, str, list[Any]]] = []
    with reserved_port() as port:
        files = write_demo_files(folder / "federation", options, port)
        async with LocalFederation(files) as federation:
            await federation.start()
            async with federation.operator() as client:
                for seed in range(seeds):
                    for arm in arms:
                        chosen = [*setting.assignments(seed), *ARMS[arm]]
                        text = override(files.run_file, chosen, source="benchmark")
                        runs.append((arm, seed, *await played(client, text)))
    [database] = files.folder.glob("**/potluck.sqlite3")
    with Store.open(f"sqlite:///{database}") as store:
        return [
            measured(arm, seed, setting, rounds, losses_told(store, run_id, setting))
            for arm, seed, run_id, rounds in runs
        ]


def means(outcomes: list[Outcome]) -> Iterator[tuple[str, dict[str, float], float]]:
    """Yield (arm, means over seeds, standard deviation of the share of fast and clean clients)."""
    names = [each.name for each in fields(Outcome) if each.name not in ("arm", "seed")]
    for arm in dict.fromkeys(each.arm for each in outcomes):
        mine = [each for each in outcomes if each.arm == arm]
        found = {
            name: float(np.mean([getattr(each, name) for each in mine]))
            for name in names
            if getattr(mine[0], name) is not None
        }
        yield arm, found, float(np.std([each.fast_and_clean for each in mine]))


def show(outcomes: list[Outcome], setting: Setting) -> None:
    table = Table(
        title=f"{setting.clients} clients, {setting.count} a round, {setting.rounds} rounds; "
        f"λ = {setting.clock.tail_per_sample:g}, drawn for each {setting.clock.draw}"
    )
    for column in (
        "selector",
        "fast and clean",
        "last 20 rounds",
        "expected",
        "fast",
        "clean",
        "simulated h",
        "accuracy",
        "moved clean/noisy",
        "ratio clean/noisy",
        "slope pooled/within",
    ):
        table.add_column(column, justify="left" if column == "selector" else "right")
    for arm, found, deviation in means(outcomes):
        moved, ratio, slope = "", "", ""
        if "moved_clean" in found:
            moved = f"{found['moved_clean']:.2f}/{found['moved_noisy']:.2f}"
            ratio = f"{found['ratio_clean']:.2f}/{found['ratio_noisy']:.2f}"
            slope = f"{found['slope_pooled']:+.2f}/{found['slope_within']:+.2f}"
        table.add_row(
            arm,
            f"{found['fast_and_clean']:.3f} ± {deviation:.3f}",
            f"{found['fast_and_clean_late']:.3f}",
            f"{found['expected']:.3f}",
            f"{found['fast']:.2f}",
            f"{found['clean']:.2f}",
            f"{found['simulated_hours']:.1f}",
            f"{found['accuracy']:.3f}",
            moved,
            ratio,
            slope,
        )
    Console(width=160).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--clients-per-round", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--noise", type=float, default=0.15, help="mean share of wrong labels")
    parser.add_argument(
        "--noisy", type=float, default=0.4, help="share of clients with wrong labels"
    )
    parser.add_argument(
        "--tail", type=float, default=10.0, help="λ of the shifted-exponential durations"
    )
    parser.add_argument("--draw", choices=("client", "round"), default="client")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=["uniform", "flash"])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args()
    clock = VirtualClock(enabled=True, tail_per_sample=given.tail, draw=given.draw)
    setting = Setting(
        clients=given.clients,
        count=given.clients_per_round,
        rounds=given.rounds,
        noise=given.noise,
        noisy=given.noisy,
        clock=clock,
    )
    with tempfile.TemporaryDirectory(prefix="potluck-flash-") as folder:
        outcomes = asyncio.run(measure(setting, given.arms, given.seeds, Path(folder)))
    if given.json:
        print(json.dumps([asdict(outcome) for outcome in outcomes]))
    else:
        show(outcomes, setting)


if __name__ == "__main__":
    main()
