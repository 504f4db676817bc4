"""Federations on this machine, or with a coordinator on another machine."""

from __future__ import annotations

import atexit
import contextlib
import tempfile
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from potluck.common.errors import ConfigurationError, NotFoundError, RunError
from potluck.common.run_file.runfile import RunFile
from potluck.common.settings.plugins import (
    OBJECTIVES,
    QUESTIONS,
    SELECTORS,
    STRATEGIES,
    TASKS,
    installed,
)
from potluck.common.task import Task
from potluck.deploy.local.before_start import check_data, check_device, check_device_names
from potluck.deploy.local.demo import follow_processes
from potluck.deploy.operator.operator_client import OperatorClient, connect
from potluck.deploy.operator.operator_config import OperatorFlags, load_operator_config
from potluck.deploy.operator.run_view import RunView
from potluck.deploy.view.watch import follow
from potluck.federation.background import BackgroundLoop, RunFollower, background_loop
from potluck.federation.local_party import LocalParties, Party, PartyOptions
from potluck.federation.run import Run
from potluck.federation.run_settings_text import checked_text, run_table
from potluck.federation.session_plugins import SessionPlugins

if TYPE_CHECKING:
    import pandas as pd

    from potluck.client.objective import Objective
    from potluck.common.disclosure import Weighting
    from potluck.common.learning.virtual_clock import VirtualClock
    from potluck.common.run_file.run_settings import (
        Evaluation,
        MaskingSettings,
        PersonalModels,
        PrivateUpdates,
        ProfileSettings,
        Retention,
        RoundPolicy,
        SampleLimits,
        SelectionProof,
        SelectorLimits,
        Transport,
    )
    from potluck.common.run_file.runfile import Stopping
    from potluck.common.settings.local_training import LocalTraining
    from potluck.common.settings.model_table import ModelTable
    from potluck.common.updates.fixed_point import HostSumSettings
    from potluck.server.selection import Selector
    from potluck.server.strategy import Strategy

Table: TypeAlias = Mapping[str, object]
"""A table of a run file."""
_Following: TypeAlias = Callable[[str, RunFollower], Coroutine[Any, Any, RunView]]
"""Function that follows the run with the given id until it ends."""

_CLIENTS = 10
"""Number of clients of a local federation if neither the caller nor the task gives one."""


class Federation:
    """A federation; use `Federation.local` or `Federation.connect`, in a `with` statement.

    Calls wait for their answers. They also work in a notebook's cell, where an event loop runs. Use
    a federation only in the thread that made it.
    """

    def __init__(
        self,
        *,
        parties: LocalParties | None = None,
        client: OperatorClient | None = None,
        closing: contextlib.AsyncExitStack | None = None,
        clients: int | None = None,
        data: Path | None = None,
        session: SessionPlugins | None = None,
    ) -> None:
        """Use `local` or `connect` instead of calling this."""
        self._parties = parties
        self._client = client
        self._closing = closing or contextlib.AsyncExitStack()
        self._clients = clients
        self._data = data
        self._session = session or SessionPlugins()
        self._runs: list[Run] = []
        self._closed = False
        _FEDERATIONS.add(self)

    # Where it is ------------------------------------------------------------------------------

    @classmethod
    def local(
        cls,
        *,
        hosts: int = 2,
        clients: int | None = None,
        device: str = "cpu",
        data: str | Path | None = None,
        folder: str | Path | None = None,
        root: bool = False,
        disclosure: Table | None = None,
    ) -> Federation:
        """Return a federation of real processes on this machine, with certificates of its own.

        The first run starts the processes; `close` or the end of this process ends them. hosts:
        number of client processes. clients: number of clients on all hosts; None: as many as a
        run's task has data for. device: "cpu", "auto" or "cuda:N". data: the folder in which tasks
        find data. folder: folder for certificates, logs and results; None: a temporary folder.
        root: True to make a federation root, which secure sums need. disclosure: further settings
        of the hosts' `[disclosure]`. Raises ConfigurationError.
        """
        place = None if data is None else Path(data).expanduser()
        _check_local(hosts, clients, device, place, folder)
        closing = contextlib.AsyncExitStack()
        if folder is None:
            temporary = tempfile.TemporaryDirectory(prefix="potluck-")
            closing.callback(temporary.cleanup)
            folder = temporary.name
        session = SessionPlugins()
        options = PartyOptions(
            hosts=hosts, device=device, data=place, root=root, disclosure=dict(disclosure or {})
        )
        parties = LocalParties(Path(folder), options, session)
        closing.push_async_callback(parties.close)
        return cls(parties=parties, closing=closing, clients=clients, data=place, session=session)

    @classmethod
    def connect(
        cls,
        coordinator: str | None = None,
        *,
        certificate: str | Path | None = None,
        key: str | Path | None = None,
        authority: str | Path | None = None,
        server_name: str | None = None,
        config: str | Path | None = None,
        data: str | Path | None = None,
    ) -> Federation:
        """Connect to a coordinator elsewhere, with an operator's certificate.

        coordinator: HOST:PORT. Missing arguments are read from the environment (`POTLUCK_*`) or
        from operator.toml, as by the `potluck` command. config: path of operator.toml. data: the
        folder with the pretrained weights (base) of a run's model, for `Run.model`. Raises
        ConfigurationError.
        """
        paths = {
            name: None if value is None else Path(value)
            for name, value in (
                ("certificate", certificate),
                ("key", key),
                ("authority", authority),
                ("config", config),
            )
        }
        flags = OperatorFlags(coordinator=coordinator, server_name=server_name, **paths)
        settings = load_operator_config(flags)
        closing = contextlib.AsyncExitStack()

        async def opened() -> OperatorClient:
            return await closing.enter_async_context(connect(settings))

        client = background_loop().call(opened())
        place = None if data is None else Path(data).expanduser()
        return cls(client=client, closing=closing, data=place)

    # Runs -------------------------------------------------------------------------------------

    def run(
        self,
        task: str | Table | Task | type[Task] | None = None,
        *,
        run_file: str | Path | None = None,
        name: str | None = None,
        rounds: int | None = None,
        clients_per_round: int | None = None,
        expected_clients: int | None = None,
        start_timeout_seconds: float | None = None,
        seed: int | None = None,
        model: str | Table | ModelTable | None = None,
        initial_model: str | None = None,
        selector: str | Table | Selector | type[Selector] | None = None,
        strategy: str | Table | Strategy | type[Strategy] | None = None,
        objective: str
        | Table
        | Objective
        | type[Objective]
        | Sequence[str | Table | Objective | type[Objective]]
        | None = None,
        training: Table | LocalTraining | None = None,
        round: Table | RoundPolicy | None = None,  # noqa: A002  # as in run files
        transport: Table | Transport | None = None,
        evaluation: Table | Evaluation | None = None,
        personal: Table | PersonalModels | None = None,
        weighting: str | Weighting | None = None,
        secure_aggregation: bool | None = None,
        masking: Table | MaskingSettings | None = None,
        privacy: Table | PrivateUpdates | None = None,
        host_sums: Table | HostSumSettings | None = None,
        profiles: Table | ProfileSettings | None = None,
        selector_limits: Table | SelectorLimits | None = None,
        selection: Table | SelectionProof | None = None,
        sample_limits: Table | SampleLimits | None = None,
        virtual_clock: Table | VirtualClock | None = None,
        stop: Table | Stopping | None = None,
        retention: Table | Retention | None = None,
        count: int | None = None,
        roster: int | None = None,
        roster_timeout_seconds: float | None = None,
    ) -> Run:
        """Start a run. Arguments are the keys of a run file; None means the key's default.

        run_file: path or text of a run file; each argument given here replaces the file's value of
        that name. A plug-in is a name, a table with "name" and options, a class, or an instance.
        Classes defined in this process work in `local` federations only. A local federation has as
        many clients as the task has data for. It starts the run once all are connected, and by
        default selects at most that many. count, roster and roster_timeout_seconds are the old
        names of clients_per_round, expected_clients and start_timeout_seconds. Raises
        ConfigurationError, PluginError or RunError, each with a remedy.
        """
        arguments: dict[str, object] = {
            "name": name,
            "rounds": rounds,
            "clients_per_round": clients_per_round,
            "expected_clients": expected_clients,
            "start_timeout_seconds": start_timeout_seconds,
            "seed": seed,
            "model": {"name": model} if isinstance(model, str) else model,
            "initial_model": initial_model,
            "training": training,
            "round": round,
            "transport": transport,
            "evaluation": evaluation,
            "personal": personal,
            "weighting": weighting,
            "secure_aggregation": secure_aggregation,
            "masking": masking,
            "privacy": privacy,
            "host_sums": host_sums,
            "profiles": profiles,
            "selector_limits": selector_limits,
            "selection": selection,
            "sample_limits": sample_limits,
            "virtual_clock": virtual_clock,
            "stop": stop,
            "retention": retention,
            "count": count,
            "roster": roster,
            "roster_timeout_seconds": roster_timeout_seconds,
            "task": self._plugin(TASKS, task),
            "selector": self._plugin(SELECTORS, selector),
            "strategy": self._plugin(STRATEGIES, strategy),
            "objective": self._objectives(objective),
        }
        return self._start(run_table(run_file, arguments))

    def find(self, run: str) -> Run:
        """Return a run that was started before. run: its id, a unique prefix of the id, or a name.

        Raises NotFoundError.
        """
        for client, following in self._coordinators():
            with contextlib.suppress(NotFoundError):
                status = self._call(client.find_run(run))
                return self._made(status.run_id, client, following)
        raise NotFoundError(f"there is no run '{run}'; `runs` lists all runs")

    @property
    def runs(self) -> pd.DataFrame:
        """All runs, newest first, a row each; see `frames.runs_frame`."""
        from potluck.federation.frames import runs_frame

        found = [self._call(client.list_runs()) for client, _ in self._coordinators()]
        return runs_frame(status for each in reversed(found) for status in each)

    @property
    def clients(self) -> pd.DataFrame:
        """All clients that ever connected, a row each; see `frames.attendance_frame`.

        In a local federation with several coordinators: the clients of the newest.
        """
        from potluck.federation.frames import attendance_frame

        coordinators = self._coordinators()
        return attendance_frame(
            self._call(coordinators[-1][0].list_clients()) if coordinators else ()
        )

    @property
    def folder(self) -> Path | None:
        """The folder of a local federation; None if the coordinator is elsewhere."""
        return None if self._parties is None else self._parties.folder

    # Its end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """End the processes that were started here, or the connection; may be called twice.

        Runs of a coordinator elsewhere continue.
        """
        if not self._closed:
            self._closed = True
            self._background.call(self._close())

    async def _close(self) -> None:
        for run in self._runs:
            await run.close()
        await self._closing.aclose()

    def __del__(self) -> None:
        """Close the federation once no object refers to it or its runs.

        This happens, for example, when a notebook's cell runs again."""
        if self._is_open():
            self._closed = True
            self._background.begin(self._close())

    def _is_open(self) -> bool:
        """Return True if there are connections or processes to end."""
        return not self._closed and bool(self._client or (self._parties and self._parties.parties))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *details: object) -> None:
        if not self._closed:
            self._closed = True
            await self._background.wait_for(self._close())

    # Inside -----------------------------------------------------------------------------------

    @property
    def _background(self) -> BackgroundLoop:
        return background_loop()

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        if self._closed:
            work.close()
            raise RunError("the federation is closed; create another federation")
        return self._background.call(work)

    def _plugin(self, group: str, value: object) -> Any:
        if value is None:
            return None
        table = self._session.table(group, value)
        if self._parties is None and self._session.has(group, str(table.get("name"))):
            raise ConfigurationError(
                f"{table['name']} is a class of this process, which a remote coordinator does not "
                "have; install the class as a package on the coordinator, or use Federation.local"
            )
        return table

    def _objectives(self, value: object) -> Any:
        if isinstance(value, Sequence) and not isinstance(value, str):
            return [self._plugin(OBJECTIVES, each) for each in value]
        return self._plugin(OBJECTIVES, value)

    def _start(self, values: dict[str, Any]) -> Run:
        if self._parties is None:
            assert self._client is not None  # noqa: S101  # one of the two is there
            text, _ = checked_text(values)
            run_id = self._call(self._client.start_run(text))
            return self._made(run_id, self._client, partial(_follow, self._client))
        clients = self._local_clients(values)
        usual = min(RunFile.model_fields["clients_per_round"].default, clients)
        text, run = checked_text(
            {"expected_clients": clients, "clients_per_round": usual, **values}
        )
        check_device(self._parties.device)
        self._check_plugins(run)  # before processes start: they would find the same problems later
        started = self._parties.party(clients, text, installed(QUESTIONS))
        party = self._call(started)
        run_id = self._call(party.client.start_run(text))
        return self._made(run_id, party.client, partial(_follow_party, party))

    def _check_plugins(self, run: RunFile) -> None:
        """Raise PluginError if a plug-in of the run file is missing or refuses its options."""
        from potluck.client.objective import Objective
        from potluck.server.selection import Selector
        from potluck.server.strategy import Strategy

        self._session.make(Selector, run.selector.name, run.selector.options)
        self._session.make(Strategy, run.strategy.name, run.strategy.options)
        for each in run.objective:
            self._session.make(Objective, each.name, each.options)

    def _local_clients(self, values: dict[str, Any]) -> int:
        """Return the number of clients that a run needs.

        If the federation has a fixed number, and the task has an option `clients`, set the option
        to it.
        """
        _, run = checked_text(values)
        options = dict(run.task.options)
        made = self._session.make(Task, run.task.name, options)
        remedy = "name the folder that has these files: Federation.local(data=...)"
        check_data(made, run.task.name, self._data, remedy=remedy)
        if self._clients is not None:
            if made.clients and "clients" not in options and made.clients != self._clients:
                values["task"] = {**values["task"], "clients": self._clients}
                self._session.make(Task, run.task.name, {**options, "clients": self._clients})
            return self._clients
        return made.clients or run.expected_clients or max(_CLIENTS, run.clients_per_round)

    def _coordinators(self) -> list[tuple[OperatorClient, _Following]]:
        if self._closed:
            raise RunError("the federation is closed; create another federation")
        if self._parties is None:
            assert self._client is not None  # noqa: S101  # one of the two is there
            return [(self._client, partial(_follow, self._client))]
        return [(party.client, partial(_follow_party, party)) for party in self._parties.parties]

    def _made(self, run_id: str, client: OperatorClient, following: _Following) -> Run:
        run = Run(
            run_id,
            client,
            self._background,
            partial(following, run_id),
            self._session,
            self._data,
            owner=self,
        )
        self._runs.append(run)
        return run

    def __repr__(self) -> str:
        if self._parties is None:
            assert self._client is not None  # noqa: S101  # one of the two is there
            return f"<Federation at {self._client.address}>"
        return f"<Federation on this machine, in {self._parties.folder}>"

    def _repr_html_(self) -> str:
        return f"<p>{escape(repr(self)[1:-1])}</p>"


_FEDERATIONS: weakref.WeakSet[Federation] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Close the federations that a script left open, while their event loop still runs."""
    for federation in list(_FEDERATIONS):
        if federation._is_open() and background_loop().alive:
            federation.close()


def _check_local(
    hosts: object,
    clients: object,
    device: object,
    data: Path | None,
    folder: str | Path | None,
) -> None:
    """Raise ConfigurationError for arguments of `local` with which the processes would fail."""
    for name, value in (("hosts", hosts), ("clients", 1 if clients is None else clients)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigurationError(
                f"argument {name} is {value!r}, but must be a whole number from 1"
            )
    check_device_names(device)
    if data is not None and not data.is_dir():
        raise ConfigurationError(
            f"argument data is {str(data)!r}, which is not a folder", path=data
        )
    if folder is not None and Path(folder).exists() and not Path(folder).is_dir():
        raise ConfigurationError(
            f"argument folder is {str(folder)!r}, which is a file", path=folder
        )


async def _follow(client: OperatorClient, run_id: str, follower: RunFollower) -> RunView:
    return await follow(client, run_id, follower)


async def _follow_party(party: Party, run_id: str, follower: RunFollower) -> RunView:
    return await follow_processes(party.client, run_id, follower, party.federation)
