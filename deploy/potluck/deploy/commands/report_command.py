"""`potluck report`: the clients selected in a run, and the effect on the cohorts' data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from potluck.common.errors import NotFoundError
from potluck.common.records.round import Round
from potluck.common.run_file.claims import privacy_claim
from potluck.common.run_file.runfile import stored_values
from potluck.common.trainer import Measure
from potluck.deploy.commands.connection import AsJson, RunOrNewest, newest_run, operator_command
from potluck.deploy.operator.json_view import to_line
from potluck.deploy.operator.operator_client import OperatorClient
from potluck.deploy.operator.run_view import (
    RunView,
    observe,
    shown_measures,
)
from potluck.deploy.view.pictures import check_picture
from potluck.deploy.view.readable import (
    readable_count,
    readable_coverage,
    readable_measure,
    readable_privacy,
)

if TYPE_CHECKING:
    from potluck.deploy.view.run_report import RunReport


_MOST_NAMED = 10


async def report(
    client: OperatorClient,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", metavar="FILE.png", help="File to write.", show_default=False
        ),
    ],
    run_id: RunOrNewest = None,
    as_json: AsJson = False,
) -> None:
    """Draw which clients were selected, and the label mix.

    Clients are grouped by the dominant trait of their data, if they disclosed it. Cohorts are
    measured twice: as selected, and as included in the model, since lost clients change the mix.
    Also works during the run. --json prints the numbers, one object per round.

        potluck report 3f9a -o report.png
    """
    from potluck.deploy.view.run_report import (  # imports matplotlib: takes a second
        report_values,
        run_report,
        titled_measures,
    )
    from potluck.deploy.view.selection_plots import plot_selection

    check_picture(output)
    run_id = run_id or await newest_run(client)
    view = await _so_far(client, run_id)
    classes, clients = await client.fetch_profiles(run_id)
    found = run_report(view.rounds, classes, clients)
    status = view.status
    title = f"{status.task} · {status.selector} · run {status.run_id}" if status else run_id
    plot_selection(
        found.population,
        found.planned,
        output,
        title=title,
        included=found.realised,
        accuracies=found.accuracies,
        measures=titled_measures(found, shown_measures(status)),
    )
    claim = privacy_claim(stored_values(await client.fetch_run_file(run_id)))
    values = report_values(found)
    if as_json:
        for each in values:
            typer.echo(to_line(each))
        return
    typer.echo(f"{output}: {readable_count(len(values), 'round')}; on average:")
    shown = shown_measures(status)
    for line in [
        *summary_lines(values),
        *coverage_lines(found, shown),
        *spread_lines(found, shown),
        *privacy_lines(view.rounds),
        *([claim] if claim else []),
    ]:
        typer.echo(line)


def privacy_lines(rounds: Sequence[Round]) -> list[str]:
    """Return a line on the privacy loss after the last round; empty if there is no `[privacy]`."""
    found = rounds[-1].privacy if rounds else None
    return [] if found is None else [f"  privacy loss of updates: {readable_privacy(found)}"]


def coverage_lines(found: RunReport, shown: Mapping[str, Measure]) -> list[str]:
    """Return lines on the coverage of the newest metrics and on rounds with partial metrics.

    Coverage: the number of clients and samples behind a metric.
    """
    if not found.coverage:
        return []
    number, newest = max(found.coverage.items())
    over: dict[str, list[str]] = {}
    for name, measure in shown.items():
        if name in newest:
            over.setdefault(readable_coverage(newest[name]), []).append(measure.label)
    lines = [
        f"  {', '.join(labels)} of round {number}: over {text}" for text, labels in over.items()
    ]
    partial = [n for n, each in found.coverage.items() if any(c.partial for c in each.values())]
    if partial:
        numbers = ", ".join(map(str, partial[:_MOST_NAMED]))
        more = f" and {len(partial) - _MOST_NAMED} more" if len(partial) > _MOST_NAMED else ""
        lines.append(f"  rounds with partial metrics: {numbers}{more}")
    return lines


def spread_lines(found: RunReport, shown: Mapping[str, Measure]) -> list[str]:
    """Return lines on the spread over clients of the newest model's metrics; empty if unknown."""
    if not found.spreads:
        return []
    number, spreads = max(found.spreads.items())
    lines = [f"of the clients that measured the model of round {number}, each counted once:"]
    for name, measure in shown.items():
        if name in spreads:
            spread = spreads[name]
            low, _, median, _, high = (
                readable_measure(value, measure.unit) for value in spread.quantiles.values()
            )
            worst = readable_measure(spread.worst_tenth, measure.unit)
            over = readable_coverage(spread.coverage)
            lines.append(
                f"  {measure.label} of {over}: median {median}, eight tenths from {low} "
                f"to {high}, mean of the worst tenth {worst}"
            )
    return lines


def summary_lines(values: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return lines that compare planned and realised cohorts.

    Numbers are means over the rounds of `run_report.report_values`.
    """
    names = {
        "clients": "clients a round",
        "entropy": "entropy of their labels, in bits",
        "to_balanced": "distance to balanced classes",
        "to_federation": "distance to the federation's mix",
    }
    measures = {
        name: [[each[side].get(key) for each in values] for side in ("planned", "realised")]
        for key, name in names.items()
        if key in values[0]["planned"]
    }
    for kind in values[0]["planned"].get("types", {}):
        measures[f"of them {kind}"] = [
            [each[side]["types"][kind] for each in values] for side in ("planned", "realised")
        ]
    lines: list[str] = []
    for name, sides in measures.items():
        known = [[value for value in side if not math.isnan(value)] for side in sides]
        if all(known):
            planned, realised = (f"{sum(side) / len(side):.3g}" for side in known)
            lines.append(f"  {name}: {planned} selected, {realised} included")
    return lines


async def _so_far(client: OperatorClient, run_id: str) -> RunView:
    """Return the run with the rounds committed so far."""
    view = RunView()
    async with aclosing(client.watch_run(run_id)) as events:
        async for event in events:
            view = observe(view, event)
            if view.status is None:
                raise NotFoundError(f"the coordinator sent no status of run {run_id}")
            if len(view.committed) >= view.status.committed_rounds:
                break
    return view


app = typer.Typer()
app.command("report")(operator_command(report))
