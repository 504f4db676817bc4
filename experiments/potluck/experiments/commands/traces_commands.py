"""`potluck traces`: traces of clients' availability and speed for the virtual clock."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated

import typer

from potluck.common.errors import ConfigurationError, StorageError
from potluck.common.learning.availability_trace import (
    AvailabilityTrace,
    read_trace_file,
    trace_text,
)

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Generate, convert and check traces for the virtual clock.",
)


@app.callback()
def traces() -> None:
    """Generate, convert and check traces for the virtual clock."""


Target = Annotated[
    Path,
    typer.Option("--to", metavar="FILE.csv", help="File to write.", show_default=False),
]
Clients = Annotated[int, typer.Option(min=1, help="Number of clients.", show_default=False)]


@app.command()
def diurnal(
    target: Target,
    clients: Clients,
    days: Annotated[int, typer.Option(min=1, help="Length of the trace, in days.")] = 7,
    seed: Annotated[int, typer.Option(min=0, help="Seed of all random choices.")] = 0,
    hours: Annotated[
        float,
        typer.Option(
            min=0.5, max=24, help="Mean number of hours per night that a device is available."
        ),
    ] = 8.0,
    spread: Annotated[
        float,
        typer.Option(
            min=0, max=12, help="Standard deviation of a night's begin and length, in hours."
        ),
    ] = 1.0,
    zones: Annotated[int, typer.Option(min=1, max=24, help="Number of time zones.")] = 1,
    skipped: Annotated[
        float,
        typer.Option(min=0, max=1, help="Probability that a device is not available in a night."),
    ] = 0.1,
    speed_spread: Annotated[
        float,
        typer.Option(min=0, max=3, help="Standard deviation of the logarithm of devices' speeds."),
    ] = 0.5,
) -> None:
    """Generate a trace of devices that are available at night.

    The same options give the same file.

        potluck traces diurnal --clients 100 --zones 4 --seed 1 --to data/nights.csv
    """
    from potluck.experiments.traces.diurnal import Diurnal, diurnal_trace

    population = Diurnal(
        clients=clients,
        days=days,
        seed=seed,
        hours=hours,
        spread=spread,
        zones=zones,
        skipped=skipped,
        speed_spread=speed_spread,
    )
    _write(target, diurnal_trace(population))


@app.command()
def fedscale(
    behaviour: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE", help="FedScale's file client_behave_trace.", show_default=False
        ),
    ],
    target: Target,
    clients: Clients,
    capacity: Annotated[
        Path | None,
        typer.Option(
            "--capacity",
            metavar="FILE",
            help="FedScale's file client_device_capacity. Default: all devices have speed 1.",
            show_default=False,
        ),
    ] = None,
    seconds: Annotated[
        int | None,
        typer.Option(
            min=1, help="Length of the trace, in seconds. Default: that of the longest entry."
        ),
    ] = None,
) -> None:
    """Convert FedScale's files about devices.

    The files are pickles; only plain values are read from them, and no code is run. With
    --capacity, a speed is the number of samples trained per second; set seconds_per_sample = 1 and
    tail_per_sample = 0. Bandwidths are dropped, since the virtual clock has no transfers.

        potluck traces fedscale client_behave_trace --clients 100 --to data/fedscale.csv
    """
    from potluck.experiments.traces.fedscale import fedscale_trace, read_devices

    devices = None if capacity is None else read_devices(capacity)
    found = fedscale_trace(
        read_devices(behaviour), devices, clients=clients, seconds=seconds, source=str(behaviour)
    )
    _write(target, found)


@app.command()
def check(
    path: Annotated[
        Path, typer.Argument(metavar="FILE.csv", help="Trace file (CSV).", show_default=False)
    ],
) -> None:
    """Check a trace; print its size and its digest.

    Use the digest as virtual_clock.trace_sha256 in a run file.

        potluck traces check data/nights.csv
    """
    _describe(path, read_trace_file(path))


def _write(path: Path, trace: AvailabilityTrace) -> None:
    if not any(span.speed > 0 for own in trace.spans.values() for span in own):
        raise ConfigurationError(
            f"no client is available in the {trace.period:g} s of the trace, so {path} was not "
            "written; give more --clients, or a longer time (--days or --seconds)"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(trace_text(trace.spans), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"can't write {path}: {error.strerror}", path=path) from None
    _describe(path, read_trace_file(path))


def _describe(path: Path, trace: AvailabilityTrace) -> None:
    spans = [span for own in trace.spans.values() for span in own]
    shares = sum(span.end - span.start for span in spans if span.speed > 0) / trace.period
    typer.echo(
        f"{path}: {len(trace.spans)} clients, {len(spans)} rows, repeats after {trace.period:g} s; "
        f"on average {shares:.1f} clients are available"
    )
    typer.echo(f"sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}")
