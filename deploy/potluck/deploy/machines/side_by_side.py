"""Does the same work on many machines in parallel, with a progress line for each machine.

If one machine fails, the others continue.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

import requests
import urllib3
from docker.errors import APIError, DockerException
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from potluck.common.errors import PotluckError, RunError
from potluck.deploy.machines.docker_engine import unreachable
from potluck.deploy.machines.inventory import MachineSettings

Say = Callable[[str], None]
Result = TypeVar("Result")

_MOST_AT_ONCE = 32
_SECONDS_BETWEEN_LINES = 5.0


def side_by_side(
    machines: Sequence[MachineSettings],
    work: Callable[[MachineSettings, Say], Result],
    console: Console,
) -> dict[str, Result | PotluckError]:
    """Run `work` on each machine. Return the results or errors, by machine.

    `work` runs in one thread per machine and reports its progress. On a terminal, every machine has
    a line. Otherwise each report is printed as a line. Reports that differ only in a number are
    printed at most every few seconds.
    """
    columns = (
        SpinnerColumn(),
        TextColumn("{task.fields[machine]}"),
        TextColumn("{task.description}"),
    )
    live = console.is_terminal
    with (
        Progress(*columns, TimeElapsedColumn(), console=console, disable=not live) as progress,
        ThreadPoolExecutor(min(_MOST_AT_ONCE, max(1, len(machines)))) as pool,
    ):
        rows = {m.name: progress.add_task("waiting", total=1, machine=m.name) for m in machines}
        futures = {}
        for machine in machines:
            line = _Line(machine.name, progress, rows[machine.name], console if not live else None)
            futures[pool.submit(attempt, work, machine, line.say)] = (machine, line)
        results: dict[str, Result | PotluckError] = {}
        for future in as_completed(futures):
            machine, line = futures[future]
            result = future.result()
            results[machine.name] = result
            failed = isinstance(result, PotluckError)
            line.end(f"failed: {result}" if failed else "done")
    return {machine.name: results[machine.name] for machine in machines}


def failures(results: Mapping[str, Result | PotluckError]) -> dict[str, PotluckError]:
    """Return the errors of the machines that failed, by machine."""
    return {name: each for name, each in results.items() if isinstance(each, PotluckError)}


def raise_failures(results: Mapping[str, object], console: Console) -> None:
    """Print which machines failed and why. Raises RunError if any failed."""
    failed = failures(results)
    if not failed:
        return
    for name, error in failed.items():
        console.print(Text(f"{name}: {error.message}", style="red"), soft_wrap=True)
    raise RunError(
        f"{len(failed)} of {len(results)} machines failed: {', '.join(failed)}. Fix the cause and "
        "run the command again; finished work is not repeated",
        machines=", ".join(failed),
    )


class _Line:
    """The progress line of one machine."""

    def __init__(
        self, machine: str, progress: Progress, row: TaskID, console: Console | None
    ) -> None:
        self._machine, self._progress, self._row, self._console = machine, progress, row, console
        self._subject, self._said_at = "", 0.0

    def say(self, text: str) -> None:
        self._progress.update(self._row, description=text)
        if self._console is None:
            return
        subject, now = text.partition(":")[0], time.monotonic()
        if subject == self._subject and now - self._said_at < _SECONDS_BETWEEN_LINES:
            return
        self._subject, self._said_at = subject, now
        self._console.print(Text(f"{self._machine}: {text}"), soft_wrap=True)

    def end(self, text: str) -> None:
        self._subject = ""
        self.say(text)
        self._progress.update(self._row, completed=1)


def attempt(
    work: Callable[[MachineSettings, Say], Result], machine: MachineSettings, say: Say
) -> Result | PotluckError:
    """Run `work` on a machine. Return its result, or its error with a remedy."""
    try:
        return work(machine, say)
    except PotluckError as error:
        return error
    except APIError as error:
        why = " ".join(str(error.explanation or error).split())
        return RunError(
            f"the engine of machine {machine.name} refused a request: {why}", machine=machine.name
        )
    except (
        DockerException,
        requests.RequestException,
        urllib3.exceptions.HTTPError,
        OSError,
    ) as error:
        return unreachable(machine, error)
