"""Follows a run until it ends: on a terminal, as plain lines, or as JSON.

After a lost connection, the watcher reconnects and continues.
"""

from __future__ import annotations

import asyncio
from typing import IO, Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from potluck.common.errors import UnreachableError
from potluck.deploy.operator.json_view import event_values, to_line
from potluck.deploy.operator.operator_client import OperatorClient
from potluck.deploy.operator.run_view import RunView, is_news, lacks_clients, observe
from potluck.deploy.view.watch_lines import event_line, notice_text
from potluck.deploy.view.watch_table import RunScreen
from potluck.rpc.v1 import operator_pb2
from potluck.rpc.v1.operator_pb2 import RunState

FIRST_PAUSE_SECONDS = 0.25
LONGEST_PAUSE_SECONDS = 5.0


class Display(Protocol):
    """Shows a run. A context manager; it is called from one thread and must not block for long."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *details: object) -> None: ...

    def show(self, view: RunView, event: operator_pb2.WatchRunResponse) -> None:
        """Show an event. view: the run after it."""
        ...

    def connection(self, text: str, *, lost: bool) -> None:
        """Show that the connection was lost (`lost`) or restored."""
        ...


class LinesDisplay:
    """Prints one plain line per noteworthy event."""

    def __init__(self, output: IO[str]) -> None:
        self._output = output
        self._standing: tuple[int, str, bool] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        return None

    def show(self, view: RunView, event: operator_pb2.WatchRunResponse) -> None:
        """Print one line, but none for progress or for a status in which only numbers grew."""
        if event.WhichOneof("event") == "status":
            standing = (event.status.state, event.status.reason, lacks_clients(event.status))
            if standing == self._standing:
                return
            self._standing = standing
        line = event_line(view, event)
        if line is not None:
            self._write(line)

    def connection(self, text: str, *, lost: bool) -> None:
        """Print a line that the connection was lost (`lost`) or restored."""
        self._write(f"warning: {text}" if lost else text)

    def _write(self, line: str) -> None:
        print(line, file=self._output, flush=True)


class JsonDisplay(LinesDisplay):
    """Prints one JSON object per line and event, including progress."""

    def show(self, view: RunView, event: operator_pb2.WatchRunResponse) -> None:
        """Print the event's values."""
        del view
        self._write(to_line(event_values(event)))

    def connection(self, text: str, *, lost: bool) -> None:
        """Print an event for the state of the connection."""
        self._write(to_line({"event": "connection", "connected": not lost, "text": text}))


class LiveDisplay:
    """Shows a table that is kept up to date, for a terminal; notices scroll above it."""

    def __init__(self, console: Console) -> None:
        self._screen = RunScreen()
        self._live = Live(self._screen, console=console, refresh_per_second=8)

    def __enter__(self) -> Self:
        self._live.start(refresh=True)
        return self

    def __exit__(self, *details: object) -> None:
        self._live.stop()

    def show(self, view: RunView, event: operator_pb2.WatchRunResponse) -> None:
        """Draw the current state of the run."""
        self._screen.view = view
        self._screen.connection = ""
        if event.WhichOneof("event") == "notice":
            style = "yellow" if event.notice.warning else "dim"
            self._live.console.print(Text(notice_text(event.notice), style=style))

    def connection(self, text: str, *, lost: bool) -> None:
        """Show the state of the connection in place of the current round."""
        self._screen.connection = text if lost else ""


def display_for(console: Console, *, as_json: bool) -> Display:
    """Return the display for a console: JSON if `as_json`, live on a terminal, otherwise lines."""
    if as_json:
        return JsonDisplay(console.file)
    return LiveDisplay(console) if console.is_terminal else LinesDisplay(console.file)


def pause_seconds(attempt: int) -> float:
    """Return the seconds to wait before attempt number `attempt` (from 1) to reconnect."""
    return min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(attempt - 1, 30))


async def follow(
    client: OperatorClient, run_id: str, display: Display, *, newest_rounds: int = 0
) -> RunView:
    """Show a run until it ends. Return its last view.

    newest_rounds: maximum number of already committed rounds to show, the newest ones; 0 for all.
    run_id: an id, a unique beginning of an id, or a name. If the coordinator disconnects, the call
    waits for it without a limit. If it can't be reached at the start, UnreachableError is raised.
    """
    view, failures = RunView(), 0
    while not view.ended:
        try:
            known = max(view.committed, default=0)
            newest = 0 if known else newest_rounds
            events = client.watch_run(run_id, after_round=known, newest_rounds=newest)
            async for event in events:
                if failures:
                    failures = 0
                    display.connection(f"back with the coordinator at {client.address}", lost=False)
                if is_news(view, event):
                    view = observe(view, event)
                    if view.status is not None:  # another run may get the same name
                        run_id = view.status.run_id
                    display.show(view, event)
        except UnreachableError:
            if view.status is None:
                raise
        if view.ended:
            break
        failures += 1
        pause = pause_seconds(failures)
        if failures == 1:
            text = f"lost the coordinator at {client.address}; trying to reach it again"
            display.connection(text, lost=True)
        await asyncio.sleep(pause)
    return view


def is_finished(view: RunView) -> bool:
    """Return True if the run committed all its rounds."""
    return view.status is not None and view.status.state == RunState.RUN_STATE_FINISHED
