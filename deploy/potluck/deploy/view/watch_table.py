"""A run on a terminal: its rounds as a table, the current round as a bar."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from itertools import cycle, islice

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from potluck.common.learning.spread import Coverage
from potluck.common.records.round import TROUBLED, Round
from potluck.deploy.operator.run_view import (
    RunView,
    fraction_done,
    run_state_name,
    shown_measures,
    spread_measures,
    state_counts,
    waiting_text,
)
from potluck.deploy.view.readable import (
    readable_bytes,
    readable_measure,
    readable_privacy,
    readable_seconds,
)
from potluck.deploy.view.watch_lines import cohort_text, is_missing
from potluck.rpc.v1 import operator_pb2
from potluck.rpc.v1.operator_pb2 import RunState

_STATE_STYLES = {
    RunState.RUN_STATE_WAITING: "yellow",
    RunState.RUN_STATE_RUNNING: "cyan",
    RunState.RUN_STATE_FINISHED: "green",
    RunState.RUN_STATE_STOPPED: "yellow",
    RunState.RUN_STATE_FAILED: "red",
}
PHASES = {
    "select": "selecting",
    "train": "training",
    "reduce": "combining updates",
    "evaluate": "evaluating",
    "commit": "committing",
}
PARTIAL = "* partial: over fewer of the clients asked than evaluation.least_share demands"
_LINES_AROUND_TABLE = 8
_ALWAYS = 2
"""Number of metrics that have a column before any round has metrics."""
_STYLES = ("", "green", "magenta")


class RunScreen:
    """The latest view of a run, drawn whenever the terminal requests it."""

    def __init__(self) -> None:
        self.view = RunView()
        self.connection: str = ""
        self._spinner = Spinner("dots", style="cyan")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw as many of the newest rounds as fit on the screen."""
        privacy = self.view.rounds[-1].privacy if self.view.committed else None
        around = _LINES_AROUND_TABLE + (privacy is not None)
        room = max(3, (options.height or console.height) - around)
        yield run_header(self.view)
        if self.view.status is not None and self.view.status.left_out:
            yield Text(self.view.status.left_out, style="yellow")
        if self.view.committed:
            yield rounds_table(self.view, room)
            if privacy is not None:
                yield Text(f"privacy loss: {readable_privacy(privacy)}", style="dim")
        if self.connection:
            yield Text(self.connection, style="yellow")
        elif not self.view.ended:
            yield self._under_way()

    def _under_way(self) -> RenderableType:
        grid = Table.grid(padding=(0, 1))
        for _ in range(3):
            grid.add_column(vertical="middle")
        status, progress = self.view.status, self.view.progress
        if status is not None and status.HasField("waiting"):
            text = Text(waiting_text(status.waiting, datetime.now(UTC)), style="yellow")
            grid.add_row(self._spinner, text)
            return grid
        if progress is None:
            waiting = status is None or status.state == RunState.RUN_STATE_WAITING
            reason = status.reason if status is not None else ""
            grid.add_row(self._spinner, Text(reason or ("waiting" if waiting else "next round")))
            return grid
        rounds = status.rounds if status is not None else 0
        bar = ProgressBar(total=1.0, completed=fraction_done(progress), width=24)
        again = f", attempt {progress.attempt}" if progress.attempt > 1 else ""
        title = Text(f"round {progress.round}/{rounds}{again}", style="bold")
        grid.add_row(self._spinner, title, bar)
        return Group(grid, Text("  ").append_text(progress_text(progress)))


def run_header(view: RunView) -> Text:
    """Return the run's name, parts and status in one line."""
    status = view.status
    if status is None:
        return Text("waiting for the coordinator's first word", style="dim")
    line = Text()
    line.append(f"{status.name} ", style="bold")
    line.append(status.run_id, style="dim")
    line.append(f"  {status.task} · {status.selector} · {status.strategy} · {status.count} a round")
    line.append("  ")
    line.append(run_state_name(status.state), style=_STATE_STYLES.get(status.state, ""))
    if view.ended and status.reason:
        line.append(f": {status.reason}")
    return line


def rounds_table(view: RunView, room: int) -> Table:
    """Return a table of the newest `room` rounds.

    Metrics that none of these rounds has are omitted. If no round has any metric, the first two
    metrics have columns.
    """
    shown = view.rounds[-room:]
    metrics = [entry.measures for entry in shown]
    covered = [entry.coverage for entry in shown]
    known = shown_measures(view.status)
    measures = {
        name: each
        for name, each in known.items()
        if any(name in found for found in metrics)
        or any(is_missing(found.get(name)) for found in covered)
    } or dict(islice(known.items(), _ALWAYS))
    behind = [_first_of(measures, found) for found in covered]
    asked, counted = any(each.asked for each in behind), any(each.samples for each in behind)
    over = ["clients"] * asked + ["samples"] * counted
    worst = {
        name: label
        for name, label in spread_measures(view.status).items()
        if any(name in entry.spreads for entry in shown)
    }
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    labels = [measure.label for measure in measures.values()]
    for name in ("round", "cohort", *labels, *over, *worst.values(), "time", "down", "up"):
        table.add_column(name, justify="right", no_wrap=True)
    for entry, found, coverage, first in zip(shown, metrics, covered, behind, strict=True):
        dropped = any(member.state in TROUBLED for member in entry.members)
        cells = [
            Text(str(entry.number)),
            Text(cohort_text(entry), style="yellow" if dropped else ""),
            *(
                _marked(found.get(name), measure.unit, coverage.get(name), style)
                for (name, measure), style in zip(measures.items(), cycle(_STYLES), strict=False)
            ),
            *([_clients_of(first)] if asked else ()),
            *([Text(str(first.samples or "–"))] if counted else ()),
            *(_worst_tenth(entry, name, view.status) for name in worst),
            Text(readable_seconds(entry.seconds)),
            Text(readable_bytes(entry.bytes_down)),
            Text(readable_bytes(entry.bytes_up)),
        ]
        table.add_row(*cells)
    earlier = shown[0].number - 1 if shown else 0
    captions = [f"{earlier} earlier rounds not shown"] * bool(earlier)
    if any(each.partial for found in covered for each in found.values()):
        captions.append(PARTIAL)
    if captions:
        table.caption = "; ".join(captions)
        table.caption_justify = "left"
    return table


def _first_of(measures: Iterable[str], coverage: Mapping[str, Coverage]) -> Coverage:
    """Return the coverage of the first of these metrics whose coverage is known."""
    return next((coverage[name] for name in measures if name in coverage), Coverage())


def _clients_of(coverage: Coverage) -> Text:
    """Return the number of clients behind a metric, as `measured/asked` if some are missing."""
    if not coverage.asked:
        return Text("–")
    of = f"/{coverage.asked}" if coverage.incomplete else ""
    return Text(f"{coverage.clients}{of}", style="yellow" if coverage.incomplete else "")


def _marked(value: float | None, unit: str, coverage: Coverage | None, style: str) -> Text:
    """Return a metric's text, with a star if it is partial."""
    partial = value is not None and coverage is not None and coverage.partial
    return Text(readable_measure(value, unit) + "*" * partial, style="yellow" if partial else style)


def _worst_tenth(entry: Round, measure: str, status: operator_pb2.RunStatus | None) -> Text:
    """Return a metric's mean over the worst tenth of clients; a dash if it is unknown."""
    found = entry.spreads.get(measure)
    value = None if found is None else found.worst_tenth
    coverage = None if found is None else found.coverage
    return _marked(value, shown_measures(status)[measure].unit, coverage, "magenta")


def progress_text(progress: operator_pb2.RoundProgress) -> Text:
    """Return the phase of a round and the states of its cohort."""
    text = Text(PHASES.get(progress.phase, progress.phase))
    if progress.HasField("trained"):
        text = Text(f"coordinator trains, {progress.trained:.0%}")
    for state, members, troubled in state_counts(progress):
        style = "yellow" if troubled else "dim"
        text.append(" · ").append(f"{members} {state}", style=style)
    text.append(f" · {readable_seconds(progress.seconds)}", style="dim")
    return text
