"""Starts a throwaway federation on this machine, makes runs one by one, and ends the federation."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import tomlkit
from rich.console import Console

from potluck.common.errors import RunError, StorageError
from potluck.deploy.local.demo_files import LOOPBACK, DemoFiles, reserved_port
from potluck.deploy.local.local_federation import LocalFederation
from potluck.deploy.operator.model_download import download_model
from potluck.deploy.operator.operator_client import OperatorClient
from potluck.deploy.operator.run_view import RunView, run_state_name
from potluck.deploy.view.readable import readable_count
from potluck.deploy.view.watch import Display, display_for, follow, is_finished
from potluck.deploy.view.watch_lines import status_line
from potluck.rpc.v1 import operator_pb2

# Metrics ------------------------------------------------------------------------------------------

_HEAD = """\
# Scrapes this federation: prometheus --config.file={path}
# The rules and alerts of Potluck are in deploy/assets/prometheus of its sources.
global:
  scrape_interval: 2s
  evaluation_interval: 2s

scrape_configs:
"""


@contextlib.contextmanager
def reserved_ports(count: int) -> Iterator[list[int]]:
    """Reserve ports of the loopback interface while the block runs."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(reserved_port()) for _ in range(count)]


def serve_metrics(files: DemoFiles, ports: Sequence[int]) -> Path:
    """Configure the coordinator and each host to serve metrics on these loopback ports.

    ports: the coordinator's, then one per host. Return the path of a Prometheus configuration that
    scrapes them. Raises StorageError.
    """
    path = files.folder / "prometheus.yml"
    paths = [files.coordinator, *files.hosts]
    addresses = [f"{LOOPBACK}:{port}" for port in ports]
    try:
        for file, address in zip(paths, addresses, strict=True):
            document = tomlkit.parse(file.read_text())
            document["metrics_address"] = address
            file.write_text(tomlkit.dumps(document))
        targets = dict(zip([file.stem for file in paths], addresses, strict=True))
        path.write_text(_HEAD.format(path=path) + _jobs(targets))
    except OSError as error:
        raise StorageError(
            f"can't write {error.filename or files.folder}: {error.strerror}"
        ) from error
    return path


def _jobs(targets: dict[str, str]) -> str:
    """Return two scrape jobs as YAML, one for the coordinator and one for the hosts.

    Entries are written as JSON, which is valid YAML. targets: address by process name.
    """
    lines: list[str] = []
    for job, names in (
        ("potluck-coordinator", [name for name in targets if name == "coordinator"]),
        ("potluck-host", [name for name in targets if name != "coordinator"]),
    ):
        lines += [f"  - job_name: {job}", "    static_configs:"]
        lines += [
            f"      - {json.dumps({'targets': [targets[name]], 'labels': {'instance': name}})}"
            for name in names
        ]
    return "\n".join(lines) + "\n"


# The federation -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DemoRun:
    """A run that a demo makes. model: file to which its last model is downloaded."""

    name: str
    run_file: str
    model: Path


async def run_demo(
    files: DemoFiles, console: Console, runs: Sequence[DemoRun] = ()
) -> list[RunView]:
    """Start the federation and make the runs one after another. Return the ended runs' views.

    runs: runs to make; by default the run of the federation's run file. Each run's model is
    downloaded when the run is finished. Shows progress on `console`. All processes are ended in
    every case. If cancelled, prints how far the runs have come. Raises RunError if a run fails or a
    process ends too early.
    """
    runs = runs or [DemoRun("demo", files.run_file, files.model)]
    seen: list[_RecordingDisplay] = []
    try:
        async with LocalFederation(files) as federation:
            with console.status(
                f"starting the coordinator and {readable_count(len(files.hosts), 'host')} "
                "(importing torch takes a moment)"
            ):
                await federation.start()
            async with federation.operator() as client:
                for run in runs:
                    if len(runs) > 1:
                        console.print(f"\nrun {len(seen) + 1} of {len(runs)}: {run.name}")
                    with display_for(console, as_json=False) as display:
                        seen.append(_RecordingDisplay(display))
                        await _finish(run, client, seen[-1], federation)
    except asyncio.CancelledError:
        done = "; ".join(map(_progress, runs, seen)) or "no run was started"
        console.print(
            f"interrupted: {done}. All processes have ended. Files: {files.folder}",
            highlight=False, markup=False, soft_wrap=True,
        )  # fmt: skip
        raise
    return [each.view for each in seen]


async def _finish(
    run: DemoRun, client: OperatorClient, display: _RecordingDisplay, federation: LocalFederation
) -> None:
    """Make one run, show it, download its model. Raises RunError if the run does not finish."""
    run_id = await client.start_run(run.run_file)
    view = await follow_processes(client, run_id, display, federation)
    if not is_finished(view):
        raise _unfinished(view, federation.files)
    await download_model(client, run_id, run.model, describe=True)


def _progress(run: DemoRun, seen: _RecordingDisplay) -> str:
    """Return a run's state and its number of committed rounds as text."""
    status = seen.view.status
    if status is None:
        return f"run {run.name} had not begun"
    rounds = f"{len(seen.view.committed)} of {status.rounds} rounds committed"
    return f"run {run.name} {run_state_name(status.state)}, {rounds}"


def _unfinished(view: RunView, files: DemoFiles) -> RunError:
    what = "the run ended early" if view.status is None else status_line(view.status)
    return RunError(f"{what}; see the logs in {files.folder}", folder=files.folder)


async def follow_processes(
    client: OperatorClient,
    run_id: str,
    display: Display,
    federation: LocalFederation,
    *,
    need_all: bool = False,
) -> RunView:
    """Follow the run while the federation's processes are alive.

    It is an error if the coordinator ends, if a host ends before round 1, or if the last host ends.
    If another host ends later, a notice is shown and the run continues without that host. With
    `need_all`, that is an error as well.
    """
    seen = _RecordingDisplay(display)
    following = asyncio.create_task(follow(client, run_id, seen))
    lives = {asyncio.create_task(process.ended()): process for process in federation.processes}
    try:
        while not following.done():
            await asyncio.wait({following, *lives}, return_when=asyncio.FIRST_COMPLETED)
            for life in [life for life in lives if life.done() and not following.done()]:
                process = lives.pop(life)
                alone = set(lives.values()) <= {federation.coordinator}
                if need_all or alone or process is federation.coordinator or not seen.under_way:
                    raise process.exit_reason()
                notice = operator_pb2.Notice(warning=True, text=process.exit_reason().message)
                seen.show(seen.view, operator_pb2.WatchRunResponse(notice=notice))
        return following.result()
    finally:
        for task in (following, *lives):
            task.cancel()
        await asyncio.gather(following, *lives, return_exceptions=True)


class _RecordingDisplay:
    """A display that also stores the latest view."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self.view = RunView()

    @property
    def under_way(self) -> bool:
        """True once round 1 has begun."""
        return self.view.progress is not None or bool(self.view.committed)

    def __enter__(self) -> _RecordingDisplay:
        return self

    def __exit__(self, *details: object) -> None:
        return None

    def show(self, view: RunView, event: operator_pb2.WatchRunResponse) -> None:
        """Store the view and show it."""
        self.view = view
        self._display.show(view, event)

    def connection(self, text: str, *, lost: bool) -> None:
        """Show that the coordinator was disconnected (`lost`) or is connected again."""
        self._display.connection(text, lost=lost)
