"""Cost of monitoring: the share of a round's time that metrics take, and the time of a scrape.

python benchmarks/metrics.py --clients 100 --rounds 10 --attending 1000
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from rich.console import Console
from rich.table import Table

from potluck.common.monitoring import definitions as metrics
from potluck.common.monitoring.instruments import Instruments
from potluck.common.monitoring.metric_labels import LATEST_RUNS, RUN, MeasuredParty
from potluck.common.monitoring.metrics_server import monitoring
from potluck.common.process.logs import LogLevel, configure_logging
from potluck.common.settings.configuration import load
from potluck.deploy.local.demo_files import DemoFiles, DemoOptions, reserved_port, write_demo_files
from potluck.deploy.local.local_federation import LocalFederation
from potluck.rpc.v1 import operator_pb2
from potluck.server.config import CoordinatorConfig
from potluck.server.hosts.attendance import Attendance, HostSession
from potluck.server.live.run_metrics import RunObserver
from potluck.server.reduce.model_work import ModelWork
from potluck.server.run import commit as finishing
from potluck.server.service.coordinator_metrics import CoordinatorMetrics
from potluck.server.service.serving import serving
from potluck.server.store.records import RunRow, RunState


@dataclass
class Meter:
    """Processor seconds spent in functions whose only purpose is metrics."""

    seconds: float = 0.0
    calls: int = 0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            begun = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - begun
                self.calls += 1

        return call


@contextmanager
def metered(meter: Meter) -> Iterator[None]:
    """While the block runs, time all functions that rounds call for metrics, in this process."""
    own = ("noted", "failed", "profile", "sent", "upload_begins", "received", "committed", "cohort")
    more = ("picks", "heterogeneity", "privacy", "began", "resumed", "ended")
    places: list[tuple[Any, str]] = [(RunObserver, name) for name in own + more]
    places += [(CoordinatorMetrics, name) for name in ("transfer", "refused", "under_way")]
    places += [(ModelWork, "step_norm")]
    places += [(finishing, "cohort_labels"), (finishing, "heterogeneity")]
    before = [(owner, name, getattr(owner, name)) for owner, name in places]
    for owner, name, function in before:
        setattr(owner, name, meter.timed(function))
    try:
        yield
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


async def rounds(files: DemoFiles) -> list[float]:
    """Run the federation with its coordinator in this process.

    Return the seconds of each round except the first.
    """
    config = load(CoordinatorConfig, files.coordinator, environment_prefix="NONE")
    seconds: list[float] = []
    async with (
        LocalFederation(files) as processes,
        processes.operator() as operator,
        serving(config),
    ):
        for number in range(len(files.hosts)):
            await processes.start_host(number)
        run_id = await operator.start_run(files.run_file)
        async for event in operator.watch_run(run_id):
            if event.WhichOneof("event") == "committed":
                seconds.append(event.committed.seconds)
            status = event.status
            if status.state == operator_pb2.RUN_STATE_FAILED:
                raise SystemExit(status.reason)
    return seconds[1:]


def cost_of_rounds(clients: int, count: int, number: int) -> dict[str, float]:
    """Measure rounds with `clients` clients on four hosts; all clients train in every round."""
    options = DemoOptions(
        task="digits", selector="fedentopt", strategy="fedavg", clients=clients, hosts=4,
        count=count, rounds=number + 1, seed=7, device="cpu",
    )  # fmt: skip
    meter = Meter()
    with tempfile.TemporaryDirectory() as name, reserved_port() as port, metered(meter):
        files = write_demo_files(Path(name) / "federation", options, port)
        found = asyncio.run(rounds(files))
    per_round = meter.seconds / (number + 1)
    return {
        "seconds_per_round": statistics.median(found),
        "metrics_seconds_per_round": per_round,
        "share": per_round / statistics.median(found),
        "calls_per_round": meter.calls / (number + 1),
    }


def attending(instruments: Instruments, clients: int, state: Path) -> CoordinatorMetrics:
    """Return a coordinator's metrics with one host per client and every series shown."""
    attendance = Attendance(time.monotonic)
    for number in range(clients):
        attendance.attach(
            HostSession(
                host_id=f"host-{number}",
                client_ids=(f"client-{number}",),
                device="cpu",
                tasks=frozenset(),
            )
        )
    found = CoordinatorMetrics(instruments, attendance, state)
    found.watch_certificate(lambda: datetime.now(UTC), lambda: datetime.now(UTC))
    spool = state / "spool" / "run" / "1.1"
    spool.mkdir(parents=True)
    for number in range(clients):
        (spool / f"client-{number}@0.safetensors").touch()
    for number in range(LATEST_RUNS):
        run = f"{number:08x}"
        found.observer(run).began(_row(run))
        for metric in metrics.metrics_of(MeasuredParty.COORDINATOR):
            if RUN in metric.labels and not metric.name.endswith("_info"):
                _show_all(instruments, metric, run)
    return found


def _show_all(instruments: Instruments, metric: metrics.Metric, run: str) -> None:
    [*others] = [label for label in metric.labels if label is not RUN]
    for value in others[0].values if others else ("",):
        labels = {others[0].name: value} if others else {}
        instruments.set(metric, 0.123456789, run=run, **labels)


def _row(run: str) -> RunRow:
    at = datetime.now(UTC)
    return RunRow(
        run_id=run, name="n" * 80, run_file="", created_at=at, rounds=1, count=1, seed=0,
        task="colored-digits", selector="feddiverse", strategy="fedavg", state=RunState.RUNNING,
        reason="", changed_at=at, committed_rounds=0, model_blake3=None,
    )  # fmt: skip


async def scrapes(clients: int, times: int = 50) -> dict[str, float]:
    """Return the time (ms) and size (bytes) of a metrics scrape over HTTP on loopback."""
    instruments = Instruments(MeasuredParty.COORDINATOR)
    with tempfile.TemporaryDirectory() as name:
        attending(instruments, clients, Path(name))
        async with monitoring("127.0.0.1:0", instruments) as address:

            def scrape() -> tuple[float, float, int]:
                begun, used = time.perf_counter(), time.process_time()
                with urlopen(f"http://{address}/metrics", timeout=10) as answer:
                    size = len(answer.read())
                used = time.process_time() - used
                return 1000 * (time.perf_counter() - begun), 1000 * used, size

            found = [await asyncio.to_thread(scrape) for _ in range(times)]
    return {
        "scrape_ms_median": statistics.median(each[0] for each in found),
        "scrape_processor_ms": statistics.median(each[1] for each in found),
        "scrape_bytes": found[-1][2],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--clients", type=int, default=100, help="number of clients of the federation"
    )
    parser.add_argument(
        "--clients-per-round", type=int, help="number of clients in a round; default: all"
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--attending", type=int, default=1000, help="number of connected clients at a scrape"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    configure_logging(level=LogLevel.ERROR)
    result = asyncio.run(scrapes(options.attending))
    result |= cost_of_rounds(
        options.clients, options.clients_per_round or options.clients, options.rounds
    )
    if options.json:
        print(json.dumps(result))
        return
    table = Table(title=f"rounds of {options.clients} clients; {options.attending} attending")
    table.add_column("what")
    table.add_column("value", justify="right")
    for what, value in (
        ("seconds per round, median", f"{result['seconds_per_round']:.3f}"),
        ("processor time for metrics", f"{1000 * result['metrics_seconds_per_round']:.2f} ms"),
        ("share of the round", f"{100 * result['share']:.3f} %"),
        ("calls per round", f"{result['calls_per_round']:.0f}"),
        ("scrape, median", f"{result['scrape_ms_median']:.1f} ms"),
        ("scrape, processor time", f"{result['scrape_processor_ms']:.1f} ms"),
        ("scrape, size", f"{result['scrape_bytes'] / 1000:.1f} kB"),
    ):
        table.add_row(what, value)
    Console().print(table)


if __name__ == "__main__":
    main()
