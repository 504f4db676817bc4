"""A run: iterate over its rounds, or ask for its results."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console

from potluck.common.errors import NotFoundError, RunError
from potluck.common.settings.extras import extra_named
from potluck.deploy.operator.model_download import DownloadedModel, download_model
from potluck.deploy.operator.operator_client import OperatorClient
from potluck.deploy.operator.run_view import RunView, run_state_name, shown_measures
from potluck.deploy.view.watch import display_for, follow
from potluck.federation.background import BackgroundLoop, RunFollower
from potluck.federation.rounds import Round
from potluck.federation.run_html import in_notebook, run_html, shown
from potluck.federation.session_plugins import SessionPlugins
from potluck.rpc.v1 import operator_pb2

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from potluck.deploy.cards.model_card import ModelCard
    from potluck.federation.model_report import ModelReport

Answer = TypeVar("Answer")
Follow = Callable[[RunFollower], Coroutine[Any, Any, RunView]]
"""Function that follows a run until it ends."""


class Run:
    """A run of a federation; made by `Federation.run` and `Federation.find`.

    Iterating with `for` or `async for` yields the run's rounds as they are committed, from the
    first until the run ends. Both raise RunError if the run fails. The run continues by itself,
    also if the loop ends early.
    """

    def __init__(
        self,
        run_id: str,
        client: OperatorClient,
        background: BackgroundLoop,
        follow: Follow,
        session: SessionPlugins,
        data: Path | None,
        *,
        owner: object,
    ) -> None:
        """owner: federation that must stay open while the run is used; referenced here for that."""
        self.id = run_id
        self._owner = owner
        self._closed = False
        self._client = client
        self._background = background
        self._follow = follow
        self._session = session
        self._data = data
        self._follower = background.call(self._begin())

    async def _begin(self) -> RunFollower:
        follower = RunFollower()
        follower.begin(self._follow(follower))
        return follower

    # What happens in it -----------------------------------------------------------------------

    def __iter__(self) -> Iterator[Round]:
        number = 1
        while (committed := self._background.call(self._follower.round(number))) is not None:
            yield committed
            number += 1

    async def __aiter__(self) -> AsyncIterator[Round]:
        number = 1
        while True:
            committed = await self._background.wait_for(self._follower.round(number))
            if committed is None:
                return
            yield committed
            number += 1

    def wait(self) -> Run:
        """Wait until the run ends, and return it. Raises RunError if it fails."""
        self._background.call(self._follower.end())
        return self

    def watch(self) -> Run:
        """Show the run until it ends, and return it. Raises RunError if it fails.

        A notebook shows a table that updates itself; elsewhere the display is that of `potluck
        watch`. Ctrl-C only stops the display; the run continues.
        """
        if in_notebook():
            display, version = shown(self), 0
            while (version := self._background.call(self._follower.news(version))) > 0:
                display.update(self)
            display.update(self)
        else:
            with display_for(Console(), as_json=False) as screen:
                self._background.call(follow(self._client, self.id, screen))
        return self.wait()

    @property
    def status(self) -> operator_pb2.RunStatus:
        """The run's current status, fetched from the coordinator."""
        return self._call(self._client.find_run(self.id))

    @property
    def state(self) -> str:
        """The run's state in one word: waiting, running, finished, stopped or failed."""
        return run_state_name(self.status.state)

    @property
    def notices(self) -> tuple[str, ...]:
        """Notices about the run as text, oldest first."""
        return tuple(self._follower.notices)

    @property
    def history(self) -> list[Round]:
        """The rounds committed by now, in order."""
        return self._background.call(self._follower.rounds())

    # Tables and pictures ----------------------------------------------------------------------

    @property
    def rounds(self) -> pd.DataFrame:
        """The rounds committed by now, a row each; see `frames.rounds_frame`."""
        from potluck.federation.frames import rounds_frame

        return rounds_frame(self.history)

    @property
    def clients(self) -> pd.DataFrame:
        """The clients selected by now, a row each; see `frames.clients_frame`."""
        from potluck.federation.frames import clients_frame

        return clients_frame(self.history)

    @property
    def selections(self) -> pd.DataFrame:
        """The clients selected in each round and the reasons; see `frames.selections_frame`."""
        from potluck.federation.frames import selections_frame

        return selections_frame(self.history)

    @property
    def profiles(self) -> pd.DataFrame:
        """Profiles of their data that clients have disclosed, a row each; see `profiles_frame`.

        Raises RunError before the run has its clients.
        """
        from potluck.federation.frames import profiles_frame

        _, clients = self._call(self._client.fetch_profiles(self.id))
        return profiles_frame(clients)

    @property
    def disclosures(self) -> pd.DataFrame:
        """The clients' disclosures except plain updates, with times; see `disclosures_frame`."""
        from potluck.federation.frames import disclosures_frame

        return disclosures_frame(self._call(self._client.audit_disclosures(self.id)))

    def plot(self) -> Figure:
        """Plot the metrics and the clients that trained, by round, as `potluck demo` does.

        Raises RunError before the first round is committed.
        """
        with extra_named():
            from potluck.deploy.view.run_plot import run_figure
        from potluck.deploy.view.run_summary import summarise

        view = self._follower.view
        if not view.committed:
            raise RunError(f"run {self.id} has no round to plot yet; call wait() first")
        chosen = {client for each in self.history for client in each.cohort}
        return run_figure(summarise(view, clients=max(len(chosen), 1)))

    def plot_selections(self) -> Figure:
        """Plot selections by round and the label balance of the cohorts, as `potluck report` does.

        The plot uses the label counts that clients have disclosed. Raises RunError before the first
        round is committed.
        """
        with extra_named():
            from potluck.deploy.view.run_report import run_report, titled_measures
            from potluck.deploy.view.selection_plots import selection_picture

        view = self._follower.view
        classes, clients = self._call(self._client.fetch_profiles(self.id))
        found = run_report(view.rounds, classes, clients)
        return selection_picture(
            found.population,
            found.planned,
            title="" if view.status is None else f"{view.status.task} · {view.status.selector}",
            included=found.realised,
            accuracies=found.accuracies,
            measures=titled_measures(found, shown_measures(view.status)),
        )

    # Its model --------------------------------------------------------------------------------

    @property
    def best(self) -> Round | None:
        """The round of the best model so far; None if there is none yet.

        It is the first round with the best value of the metric that the run file names in `stop`,
        or in `keep_best` of `retention`.
        """
        status = self.status
        if not status.HasField("best"):
            return None
        return self._background.call(self._follower.round(status.best.round))

    def model(self, round: int = 0, *, best: bool = False) -> Any:  # noqa: A002  # the usual term
        """Return the task's network with the weights of a round; 0: the last committed round.

        best: use the round `best` instead. The result is a `torch.nn.Module` in evaluation mode, or
        a dict of arrays if the task's model is a dict. Raises RunError before the first round is
        committed, NotFoundError if the model is not kept or no best model is known, PluginError for
        a task that is not installed here.
        """
        from potluck.federation.trained_model import trained_model

        with tempfile.TemporaryDirectory(prefix="potluck-model-") as folder:
            path = Path(folder) / "model.safetensors"
            found = self._download(path, round, best=best, describe=False)
            made = trained_model(path, found.run_file, self._session, self._data)
        return made.network

    def evaluate(self, round: int = 0, *, best: bool = False) -> ModelReport:  # noqa: A002
        """Measure a round's model on this machine, on its task's evaluation data, class by class.

        Raises ConfigurationError if the task has no such data on this machine or has its own
        trainer, and the errors of `model`.
        """
        from potluck.federation.model_report import evaluated_model

        with tempfile.TemporaryDirectory(prefix="potluck-model-") as folder:
            path = Path(folder) / "model.safetensors"
            found = self._download(path, round, best=best, describe=False)
            return evaluated_model(path, found.run_file, self._session, self._data)

    def save(self, path: str | Path, round: int = 0, *, best: bool = False) -> Path:  # noqa: A002
        """Write a round's weights and their origin to a safetensors file; return its path.

        Raises the errors of `model`.
        """
        return self._download(Path(path), round, best=best, describe=True).path

    def card(self, round: int = 0, *, best: bool = False) -> ModelCard:  # noqa: A002
        """Return the model card of a round; 0: the last committed round.

        The card lists the run file, cohorts, versions of data and software, metrics and the privacy
        spent. best: use the round `best` instead. `card.values()` returns plain values,
        `card.markdown()` a readable text. Raises RunError if the round does not exist.
        """
        from potluck.deploy.cards.card_source import card_of_run

        status = self.status
        found = status.best.round if best else round or status.committed_rounds
        if not 1 <= found <= status.committed_rounds or (best and round):
            which = "best model" if best else f"model of round {round}" if round else "model"
            how = (
                "the run needs stop.measure or retention.keep_best in its run file"
                if best
                else "name a committed round"
            )
            raise RunError(f"run {self.id} has no {which} yet; {how}")
        measure = status.best.measure if best else None
        return self._call(card_of_run(self._client, self.id, round_number=found, best_of=measure))

    def _download(self, path: Path, number: int, *, best: bool, describe: bool) -> DownloadedModel:
        if number < 0:
            raise NotFoundError(f"round {number} does not exist; rounds are numbered from 1")
        if number == 0 and not self.status.committed_rounds:
            raise RunError(
                f"run {self.id} has no model yet; call wait() until the first round is committed"
            )
        return self._call(
            download_model(
                self._client, self.id, path, round_number=number, best=best, describe=describe
            )
        )

    # What is done to it -----------------------------------------------------------------------

    def stop(self) -> Run:
        """Stop the run and return it. The current round is abandoned; the last model stays."""
        self._call(self._client.stop_run(self.id))
        return self

    def resume(self) -> Run:
        """Resume a stopped or failed run after its last committed round, and return it."""
        self._call(self._resume())
        return self

    async def _resume(self) -> None:
        await self._follower.close()
        await self._client.resume_run(self.id)
        self._follower.begin(self._follow(self._follower))

    def delete(self) -> None:
        """Delete a run that is over: its rounds, and models that no other run shares.

        The record of what its clients have disclosed stays. Raises RunError if the run is under
        way.
        """
        self._call(self._client.delete_run(self.id))

    @property
    def run_file(self) -> str:
        """The run file with which it was started, as TOML; `Federation.run` accepts it."""
        return self._call(self._client.fetch_run_file(self.id))

    def _call(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """Return the coordinator's answer. Raises RunError if the federation is closed."""
        if self._closed:
            work.close()
            raise RunError(
                f"the federation of run {self.id} is closed; make this call before `close()`; "
                "received rounds stay available"
            )
        return self._background.call(work)

    async def close(self) -> None:
        """Stop following the run. The federation calls this on the background loop."""
        self._closed = True
        await self._follower.close()

    # How it shows itself ----------------------------------------------------------------------

    def __repr__(self) -> str:
        status = self._follower.view.status
        if status is None:
            return f"<Run {self.id}>"
        done = f"{status.committed_rounds} of {status.rounds} rounds"
        return f"<Run {self.id} ({status.name}): {run_state_name(status.state)}, {done}>"

    def _repr_html_(self) -> str:
        return run_html(self.id, self._follower.view, self.history)
