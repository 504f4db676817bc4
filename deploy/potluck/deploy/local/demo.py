"""A throwaway federation on this machine: started, run once, watched, ended."""

from __future__ import annotations

import asyncio

from rich.console import Console

from potluck.common.errors import RunError
from potluck.deploy.local.demo_files import DemoFiles
from potluck.deploy.local.local_federation import LocalFederation
from potluck.deploy.operator.model_download import download_model
from potluck.deploy.operator.operator_client import OperatorClient
from potluck.deploy.operator.run_view import RunView
from potluck.deploy.view.readable import readable_count
from potluck.deploy.view.watch import Display, display_for, follow, is_finished
from potluck.deploy.view.watch_lines import status_line
from potluck.rpc.v1 import operator_pb2


async def run_demo(files: DemoFiles, console: Console) -> RunView:
    """Start the federation, run its run file, fetch the model. Return the view of the ended run.

    Shows progress on `console`. All processes are ended in every case. Raises RunError if the run
    fails or a process ends too early.
    """
    async with LocalFederation(files) as federation:
        with console.status(
            f"starting the coordinator and {readable_count(len(files.hosts), 'host')} "
            "(importing torch takes a moment)"
        ):
            await federation.start()
        async with federation.operator() as client:
            run_id = await client.start_run(files.run_file)
            with display_for(console, as_json=False) as display:
                view = await follow_processes(client, run_id, display, federation)
            if not is_finished(view):
                raise _unfinished(view, files)
            await download_model(client, run_id, files.model, describe=True)
        return view


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
    """Follow the run while its processes are alive.

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
    """A display that keeps the latest view."""

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
        """Keep the view and show it."""
        self.view = view
        self._display.show(view, event)

    def connection(self, text: str, *, lost: bool) -> None:
        """Show that the coordinator was disconnected (`lost`) or is connected again."""
        self._display.connection(text, lost=lost)
