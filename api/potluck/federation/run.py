"""A run, as a value to iterate over and to ask."""

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
from potluck.federation.background import BackgroundLoop
from potluck.federation.following import RunFollower
from potluck.federation.notebooks import in_notebook, shown
from potluck.federation.rounds import Round
from potluck.federation.run_html import run_html
from potluck.federation.session_plugins import SessionPlugins
from potluck.rpc.v1 import operator_pb2

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from potluck.deploy.cards.model_card import ModelCard
    from potluck.federation.model_report import ModelReport

Answer = TypeVar("Answer")
Follow = Callable[[RunFollower], Coroutine[Any, Any, RunView]]
"""Follows a run until it ends."""


class Run:
    """A run of a federation; made by `Federation.run` and `Federation.find`.

    Iterating yields its rounds as they are committed, from the first, until it ends; `async for`
    does so too. Both raise RunError where the run fails. A run goes on by itself meanwhile, also
    when an iteration is left.
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
        """owner: what is not to be closed as long as somebody has the run."""
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
        """Wait until it ends; this run again. Raises RunError where it fails."""
        self._background.call(self._follower.end())
        return self

    def watch(self) -> Run:
        """Show it until it ends; this run again. Raises RunError where it fails.

        In a notebook as a table that renews itself, else as `potluck watch` does. Ctrl-C ends the
        watching, not the run.
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
        """Where it stands now."""
        return self._call(self._client.find_run(self.id))

    @property
    def state(self) -> str:
        """One word: waiting, running, finished, stopped or failed."""
        return run_state_name(self.status.state)

    @property
    def notices(self) -> tuple[str, ...]:
        """What a person should know of it, in the order it came."""
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
        """Who was selected in each round and why; see `frames.selections_frame`."""
        from potluck.federation.frames import selections_frame

        return selections_frame(self.history)

    @property
    def profiles(self) -> pd.DataFrame:
        """What clients have told of their data, a row each; see `profiles_frame`.

        Raises RunError before the run has its clients.
        """
        from potluck.federation.disclosure_frames import profiles_frame

        _, clients = self._call(self._client.fetch_profiles(self.id))
        return profiles_frame(clients)

    @property
    def disclosures(self) -> pd.DataFrame:
        """What has left clients beside their updates, and when; see `disclosures_frame`."""
        from potluck.federation.disclosure_frames import disclosures_frame

        return disclosures_frame(self._call(self._client.audit_disclosures(self.id)))

    def plot(self) -> Figure:
        """The measures by round, and who trained, as `potluck demo` draws them.

        Raises RunError before the first round is committed.
        """
        with extra_named():
            from potluck.deploy.view.run_plot import run_figure
        from potluck.deploy.view.run_summary import summarise

        view = self._follower.view
        if not view.committed:
            raise RunError(f"run {self.id} has no round to draw yet; wait() for it")
        chosen = {client for each in self.history for client in each.cohort}
        return run_figure(summarise(view, clients=max(len(chosen), 1)))

    def plot_selections(self) -> Figure:
        """Who was selected when and how even the cohorts' labels were, as `potluck report` draws.

        What is drawn of labels is what clients have told. Raises RunError before the first round
        is committed.
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
        """The round of its best model by now: the first in which the measure was best that its run
        file names, as `stop` or as `keep_best` of `retention`. None before there is one."""
        status = self.status
        if not status.HasField("best"):
            return None
        return self._background.call(self._follower.round(status.best.round))

    def model(self, round: int = 0, *, best: bool = False) -> Any:  # noqa: A002  # what it is
        """The task's network with the weights of a round; 0: of the last one committed.

        best: of the round `best` instead. It is a `torch.nn.Module` in evaluation mode, or a dict
        of arrays where the task's model is one.
        Raises RunError before the first round is committed, NotFoundError where the model is not
        kept or no best one is known, PluginError for a task that is not installed here.
        """
        from potluck.federation.trained_model import trained_model

        with tempfile.TemporaryDirectory(prefix="potluck-model-") as folder:
            path = Path(folder) / "model.safetensors"
            found = self._download(path, round, best=best, describe=False)
            made = trained_model(path, found.origin.run_file, self._session, self._data)
        return made.network

    def evaluate(self, round: int = 0, *, best: bool = False) -> ModelReport:  # noqa: A002  # likewise
        """Measure a round's model here, on its task's evaluation data, class by class.

        Raises ConfigurationError where the task has none on this machine, or brings a trainer of
        its own, and as `model` does.
        """
        from potluck.federation.model_report import evaluated_model

        with tempfile.TemporaryDirectory(prefix="potluck-model-") as folder:
            path = Path(folder) / "model.safetensors"
            found = self._download(path, round, best=best, describe=False)
            return evaluated_model(path, found.origin.run_file, self._session, self._data)

    def save(self, path: str | Path, round: int = 0, *, best: bool = False) -> Path:  # noqa: A002  # likewise
        """Write the weights of a round as safetensors, with what run they come from; the path.

        Raises as `model` does.
        """
        return self._download(Path(path), round, best=best, describe=True).path

    def card(self, round: int = 0, *, best: bool = False) -> ModelCard:  # noqa: A002  # likewise
        """What a round's model comes from: run file, cohorts, versions of data and software,
        measures, privacy spent; 0: of the last one committed.

        best: of the round `best` instead. `card.values()` is plain, `card.markdown()` for people.
        Raises RunError where there is no such round.
        """
        from potluck.deploy.cards.card_source import card_of_run

        status = self.status
        found = status.best.round if best else round or status.committed_rounds
        if not 1 <= found <= status.committed_rounds or (best and round):
            which = "best model" if best else f"model of round {round}" if round else "model"
            how = (
                "its run file names the measure, as stop.measure or retention.keep_best"
                if best
                else "name a round that is committed"
            )
            raise RunError(f"run {self.id} has no {which} yet; {how}")
        measure = status.best.measure if best else None
        return self._call(card_of_run(self._client, self.id, round_number=found, best_of=measure))

    def _download(self, path: Path, number: int, *, best: bool, describe: bool) -> DownloadedModel:
        if number < 0:
            raise NotFoundError(f"there is no round {number}; rounds are numbered from 1")
        if number == 0 and not self.status.committed_rounds:
            raise RunError(f"run {self.id} has no model yet; wait() for its first round")
        return self._call(
            download_model(
                self._client, self.id, path, round_number=number, best=best, describe=describe
            )
        )

    # What is done to it -----------------------------------------------------------------------

    def stop(self) -> Run:
        """Stop it: the round under way is abandoned, the last committed model stays."""
        self._call(self._client.stop_run(self.id))
        return self

    def resume(self) -> Run:
        """Go on after its last committed round, where it was stopped or has failed."""
        self._call(self._resume())
        return self

    async def _resume(self) -> None:
        await self._follower.close()
        await self._client.resume_run(self.id)
        self._follower.begin(self._follow(self._follower))

    def delete(self) -> None:
        """Delete it, once it is over: its rounds, and its models where no other run has the same.

        What its clients have disclosed stays. Raises RunError where it is under way.
        """
        self._call(self._client.delete_run(self.id))

    @property
    def run_file(self) -> str:
        """The run file that it was started with, as TOML; `Federation.run` takes it."""
        return self._call(self._client.fetch_run_file(self.id))

    def _call(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """What the coordinator answers. Raises RunError once the federation is closed."""
        if self._closed:
            work.close()
            raise RunError(
                f"the federation of run {self.id} is closed; ask for this before `close()`, what "
                "was seen of its rounds stays"
            )
        return self._background.call(work)

    async def close(self) -> None:
        """Follow it no longer. Called on the background loop, by its federation."""
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
