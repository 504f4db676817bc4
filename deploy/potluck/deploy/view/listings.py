"""Tables of runs and of clients, for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from rich.cells import cell_len, set_cell_size
from rich.table import Table
from rich.text import Text

from potluck.deploy.operator.run_view import best_coverage, run_state_name, waiting_text
from potluck.deploy.view.readable import (
    natural_order,
    readable_age,
    readable_count,
    readable_coverage,
)
from potluck.rpc.v1 import operator_pb2

_NARROW = 110
"""Terminal width in columns below which the table of runs shows fewer columns."""


_TAGS = "tags"
_CLIENT_COLUMNS = ("client", "host", "state", "heard of", "device", _TAGS, "selected", "included")
_CLIENT_NUMBERS = {"selected", "included"}


def runs_table(runs: Sequence[operator_pb2.RunStatus], now: datetime, *, width: int) -> Table:
    """Return a table of runs in the given order, one line per run; long reasons are cut off."""
    details = ("task", "selector", "strategy") if width >= _NARROW else ()
    columns = ("run", "name", "state", "rounds", *details, "started", "why")
    table = _table(columns, right={"rounds"})
    for column in table.columns[:-1]:
        column.no_wrap = True  # only reasons may be cut, no other column
    for status in runs:
        described = (status.task, status.selector, status.strategy) if details else ()
        table.add_row(
            *_texts(
                status.run_id,
                status.name,
                run_state_name(status.state),
                f"{status.committed_rounds}/{status.rounds}",
                *described,
                readable_age(status.created_at.ToDatetime(tzinfo=UTC), now),
            ),
            Text(" ".join(_why(status, now).split()), no_wrap=True, overflow="ellipsis"),
        )
    return table


def run_table(status: operator_pb2.RunStatus, now: datetime) -> Table:
    """Return a table with all known facts about a run."""
    started = status.created_at.ToDatetime(tzinfo=UTC)
    rows = {
        "run": status.run_id,
        "name": status.name,
        "state": run_state_name(status.state),
        "why": _why(status, now),
        "rounds": f"{status.committed_rounds} of {status.rounds} committed",
        "task": status.task,
        "selector": f"{status.selector}, {readable_count(status.count, 'client')} a round",
        "strategy": status.strategy,
        "seed": str(status.seed),
        "started": f"{readable_age(started, now)} ({started:%Y-%m-%d %H:%M} UTC)",
        "model": status.model_blake3,
        "best": _best_text(status.best) if status.HasField("best") else "",
    }
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows.items():
        if value:
            table.add_row(name, Text(value))
    return table


def _best_text(best: operator_pb2.BestModel) -> str:
    """Return a run's best model in one line."""
    behind = best_coverage(best)
    over = f" over {readable_coverage(behind)}" if behind is not None else ""
    since = f", {best.stalled} evaluations without improvement since" if best.stalled else ""
    if best.stalled == 1:
        since = ", 1 evaluation without improvement since"
    return f"round {best.round}, {best.measure} {best.value:.6g}{over}{since}: {best.model_blake3}"


def _why(status: operator_pb2.RunStatus, now: datetime) -> str:
    waits = status.HasField("waiting")
    why = waiting_text(status.waiting, now) if waits else status.reason
    return "; ".join(filter(None, [why, status.left_out]))


def clients_table(clients: Sequence[operator_pb2.ClientStatus], now: datetime) -> Table:
    """Return a table of all clients, sorted by id."""
    table = _table(_client_columns(clients), right=_CLIENT_NUMBERS)
    for cells in _client_rows(clients, now):
        table.add_row(*cells)
    return table


def _client_columns(clients: Sequence[operator_pb2.ClientStatus]) -> Sequence[str]:
    """Return the columns of the table; tags have a column only if a client has tags."""
    tagged = any(client.tags for client in clients)
    return [name for name in _CLIENT_COLUMNS if tagged or name != _TAGS]


def client_lines(clients: Sequence[operator_pb2.ClientStatus], now: datetime) -> Iterator[str]:
    """Yield the rows of `clients_table` as plain lines, since a large table is slow to lay out."""
    rows = [[cell.plain for cell in cells] for cells in _client_rows(clients, now)]
    columns = _client_columns(clients)
    rows.insert(0, list(columns))
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    right = [name in _CLIENT_NUMBERS for name in columns]
    for row in rows:
        padded = [
            " " * (width - cell_len(cell)) + cell if is_right else set_cell_size(cell, width)
            for cell, width, is_right in zip(row, widths, right, strict=True)
        ]
        yield "  ".join(padded).rstrip()


def _client_rows(
    clients: Sequence[operator_pb2.ClientStatus], now: datetime
) -> Iterator[list[Text]]:
    tagged = _TAGS in _client_columns(clients)
    for client in sorted(clients, key=lambda client: natural_order(client.client_id)):
        state = (
            Text("connected", style="green")
            if client.attending
            else Text("disconnected", style="yellow")
        )
        if client.relay:
            state.append(f" through {client.relay}")
        if client.left_out:
            whys = [f"excluded from run {run}: {why}" for run, why in client.left_out.items()]
            state = Text("; ".join(whys), style="yellow")
        if client.quarantined:
            state = Text(f"in quarantine: {client.quarantine_reason}", style="red")
        tags = " ".join(f"{name}={value}" for name, value in sorted(client.tags.items()))
        client_id, host_id, heard, device, *rest = _texts(
            client.client_id,
            client.host_id,
            readable_age(client.last_seen.ToDatetime(tzinfo=UTC), now),
            client.device,
            *([tags] if tagged else []),
            str(client.selected),
            str(client.included),
        )
        yield [client_id, host_id, state, heard, device, *rest]


def attendance_line(clients: Sequence[operator_pb2.ClientStatus]) -> str:
    """Return a line with the numbers of connected and disconnected hosts and clients.

    The dashboards show the same numbers.
    """
    attending = [client for client in clients if client.attending]
    hosts = len({client.host_id for client in attending})
    away = len(clients) - len(attending)
    quarantined = sum(client.quarantined for client in clients)
    return (
        f"{readable_count(hosts, 'host')} with {readable_count(len(attending), 'client')} "
        f"connected, {away} disconnected, {quarantined} in quarantine"
    )


def _table(columns: Sequence[str], *, right: set[str]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left")
    return table


def _texts(*cells: str) -> list[Text]:
    """Return table cells that are never interpreted as markup: names come from other machines."""
    return [Text(cell) for cell in cells]
