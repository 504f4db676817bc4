"""Waits until a started container is connected."""

from __future__ import annotations

import re
import time
from datetime import datetime
from typing import Any

from docker.models.containers import Container

from potluck.common.net.identity import Role
from potluck.deploy.machines.desired_state import DesiredContainer

STEADY_SECONDS = 30.0
"""Seconds after which a running container counts as connected if its log level hides that event."""

_WORDS = {Role.COORDINATOR: "listening", Role.RELAY: "connected", Role.HOST: "attending"}
"""Log event by role: a host or relay is connected, or the coordinator accepts connections."""

_LOOK_SECONDS = 0.2
_LAST_LINES = 5


class NotConnectedError(Exception):
    """A container has ended, or has not connected in time.

    why: the reason, as a clause of an error message. log: the last lines of its log, joined to one
    line.
    """

    def __init__(self, why: str, exit_code: int | None, log: str) -> None:
        super().__init__(why)
        self.why, self.exit_code, self.log = why, exit_code, log


def await_connected(container: Container, one: DesiredContainer, seconds: float) -> None:
    """Wait until the program of a started container is connected.

    The connection is read from the program's log: this works in every network, without an open
    port. Raises NotConnectedError if the program ends, or isn't connected within `seconds`.
    """
    deadline = time.monotonic() + seconds
    started, seen = "", time.monotonic()
    while True:
        container.reload()
        state = container.attrs["State"]
        if not state.get("Running") or state.get("Restarting"):
            code = int(state.get("ExitCode", 0))
            why = f"the container's program ended with exit code {code}"
            raise NotConnectedError(why, code, _last_lines(container))
        if state["StartedAt"] != started:
            started, seen = state["StartedAt"], time.monotonic()
        if one.quiet:
            connected = time.monotonic() - seen >= STEADY_SECONDS
        else:
            connected = count_events(_WORDS[one.role], _log(container, state)) > 0
        if connected:
            return
        if time.monotonic() > deadline:
            why = f"no connection after {seconds:.0f} s"
            raise NotConnectedError(why, None, _last_lines(container))
        time.sleep(_LOOK_SECONDS)


def _last_lines(container: Container) -> str:
    """Return the last log lines of a container, joined to one line."""
    lines = container.logs(tail=_LAST_LINES).decode(errors="replace").splitlines()
    return " | ".join(line.strip() for line in lines if line.strip())


def count_events(event: str, log: str) -> int:
    """Return the number of a log's lines that report an event, in either of the two log formats."""
    word = re.escape(event)
    return len(re.findall(rf'"event": ?"{word}"|\] +{word}(?=\s|$)', log))


def _log(container: Container, state: dict[str, Any]) -> str:
    """Return the log since the container's last start."""
    since = datetime.fromisoformat(state["StartedAt"]).timestamp()
    return container.logs(since=since).decode(errors="replace")
