"""Runs a cell as a federation of real processes, and resumes it after an interruption."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from potluck.common.disclosure import TRIPLET, parse_parameters
from potluck.common.errors import PotluckError, RunError
from potluck.common.net.build_version import software_version
from potluck.common.records.round import Round
from potluck.common.records.round_message import OWN_FIELDS
from potluck.common.settings import plugins
from potluck.common.tensors.encoding import Encoding
from potluck.common.tensors.model_arrays import state_arrays
from potluck.deploy.local.demo import follow_processes
from potluck.deploy.local.demo_files import (
    LOOPBACK,
    DemoFiles,
    Machines,
    opened_files,
    reserved_port,
    write_federation_files,
)
from potluck.deploy.local.local_federation import LocalFederation
from potluck.deploy.operator.operator_client import OperatorClient
from potluck.deploy.operator.run_view import RunView
from potluck.deploy.view.run_summary import CoverageSummary
from potluck.deploy.view.watch import is_finished
from potluck.deploy.view.watch_lines import status_line
from potluck.experiments.grid.grid_cells import Cell
from potluck.experiments.grid.label_mix import LabelMix
from potluck.experiments.grid.results import Before, CellResult, RoundResult, Timings
from potluck.rpc.v1 import operator_pb2
from potluck.server.plan.plan import draw_up
from potluck.server.plan.pretraining import pretraining_id
from potluck.server.store import Store
from potluck.server.store.records import Exchange, Profile, RoundRow
from potluck.server.strategy import Strategy, Weights

# Costs --------------------------------------------------------------------------------------------
# Costs are computed from the coordinator's records. The clients of an experiment share a few hosts,
# and a host fetches a model once for all of them. So the bytes that were actually sent don't show
# the costs of a federation whose clients are on separate machines.

_SHARE = {Encoding.FLOAT32: 1.0, Encoding.BFLOAT16: 0.5, Encoding.INT8: 0.25}


@dataclass(frozen=True, kw_only=True)
class CellCosts:
    """Costs of a cell's run.

    downloads: number of clients that needed the model, by round. model_bytes: size of the model's
    tensors as encoded for a client. strategy_bytes: size of the data that the strategy sends in
    addition to each client that trains. epsilon: largest privacy loss of a client by profiles; None
    if one was exact.
    """

    downloads: Mapping[int, int]
    model_bytes: int
    strategy_bytes: int
    before: Before
    epsilon: float | None = None


def costs_of(cell: Cell, state: Path, run_id: str) -> CellCosts:
    """Return the costs of a run that has ended.

    state: the coordinator's state directory; no other process may have its database open. Raises
    StorageError.
    """
    plan = draw_up(cell.run_file, source=cell.title)
    arrays = state_arrays(plan.task.model())
    size = sum(array.nbytes for array in arrays.values())
    model_bytes = round(size * _SHARE[plan.run_file.transport.down.encoding])
    with Store.open(f"sqlite:///{state / 'potluck.sqlite3'}") as store:
        roster = store.roster(run_id)
        rows = store.rounds(run_id)
        asked = {row.key.round: _asked(store.answers(row.key), roster) for row in rows}
        before = store.rounds(pretraining_id(run_id))
        profiles = store.profiles()
    simulated = plan.run_file.virtual_clock.enabled
    needed = {row.key.round: asked[row.key.round] | _members(row) for row in rows}
    # A client that estimates a triplet receives the pre-trained model, and can reuse it in round 1.
    estimated = {
        each.client_id
        for each in profiles
        if each.signal == TRIPLET and parse_parameters(each.parameters_json).model is not None
    } - needed.get(1, set())
    return CellCosts(
        downloads={number: len(clients) for number, clients in needed.items()},
        model_bytes=model_bytes,
        strategy_bytes=_beside(plan.strategy, arrays),
        before=Before(
            bytes=sum(len(row.members) * model_bytes + row.bytes_up for row in before)
            + len(estimated) * model_bytes,
            seconds=sum(row.seconds for row in before) if simulated else 0.0,
        ),
        epsilon=_privacy_loss(profiles),
    )


def _privacy_loss(profiles: Sequence[Profile]) -> float | None:
    """Return the largest sum of ε of a client's profiles; 0 without any, None if one is exact."""
    sums: dict[str, float] = {}
    for each in profiles:
        epsilon = parse_parameters(each.parameters_json).epsilon
        if epsilon is None:
            return None
        sums[each.client_id] = sums.get(each.client_id, 0.0) + epsilon
    return max(sums.values(), default=0.0)


def _beside(strategy: Strategy, model: Weights) -> int:
    """Return the bytes that a strategy sends to each training client in addition to the model."""
    if strategy.correction is None:
        return 0
    state = strategy.init(model)
    files = strategy.broadcast(state), strategy.personal(state, "client-0")
    return sum(
        each.nbytes for file in files for weights in file.values() for each in weights.values()
    )


def _members(row: RoundRow) -> set[str]:
    return {member.client_id for member in row.members}


def _asked(exchanges: Sequence[Exchange], roster: Sequence[str]) -> set[str]:
    """Return the clients that were asked a question whose answer needs the round's model."""
    found = set[str]()
    for each in exchanges:
        kind, rows = each.question.get("kind"), each.question.get("rows")
        if isinstance(rows, list) and _needs_model(kind):
            found |= {roster[int(row)] for row in cast(list[int], rows)}
    return found


def _needs_model(kind: object) -> bool:
    if not isinstance(kind, str) or kind not in plugins.installed(plugins.QUESTIONS):
        return False  # a secure sum, which needs no model
    return bool(plugins.find(plugins.QUESTIONS, kind).needs_model)


# The run of a cell --------------------------------------------------------------------------------

_STATE = "coordinator"
"""The coordinator's state directory, in the folder of a federation."""

_ACCURACY = "accuracy"

Progress = Callable[[int], None]
"""Function that is called with the number of committed rounds of the cell."""


@dataclass(frozen=True, kw_only=True)
class CellPlace:
    """Settings of the place in which a cell runs: folder, device, processes, address.

    workplace: the cell's folder. device, data: training device and data folder of the hosts.
    federation: function that makes the federation's processes from its files. address: the address
    on which the coordinator listens. choices: folder for the hosts' measured training settings
    (`choices_directory`).
    """

    workplace: Path
    device: str
    data: Path | None
    federation: Callable[[DemoFiles], LocalFederation] = LocalFederation
    address: str = LOOPBACK
    choices: Path | None = None


async def run_cell(
    cell: Cell, place: CellPlace, *, label_mix: LabelMix, progress: Progress
) -> CellResult:
    """Run a cell in its folder and return its result. The caller removes the folder.

    If the folder holds an interrupted cell, the cell is resumed after its last committed round.
    Raises RunError if the run or one of its processes fails.
    """
    started = time.monotonic()
    machines = Machines(
        clients=cell.clients,
        hosts=cell.hosts,
        device=place.device,
        choices=place.choices,
        data=place.data,
        disclosure=cell.disclosure,
        availability=cell.availability,
        address=place.address,
    )
    workplace = place.workplace
    with reserved_port(place.address) as port:
        files = _files(cell, workplace, machines, port)
        async with place.federation(files) as federation:
            await federation.start()
            async with federation.operator() as operator:
                run_id = await _run_id(operator, files)
                view = await follow_processes(
                    operator, run_id, _Counter(progress), federation, need_all=True
                )
    if not is_finished(view):
        what = "the run ended early" if view.status is None else status_line(view.status)
        raise RunError(f"{cell.title}: {what}; see the logs in {workplace}", folder=workplace)
    costs = costs_of(cell, workplace / _STATE, run_id)
    return _result(cell, view, costs, label_mix, time.monotonic() - started)


def remove_workplace(workplace: Path) -> None:
    """Remove the folder of a cell whose result is stored."""
    shutil.rmtree(workplace, ignore_errors=True)


def _files(cell: Cell, workplace: Path, machines: Machines, port: int) -> DemoFiles:
    """Return the federation's files: the existing files with the new port, or new files.

    Files that an interruption left incomplete are written again.
    """
    written = workplace / "written"
    if written.exists():
        with contextlib.suppress(PotluckError, OSError):
            return opened_files(workplace, port)
    remove_workplace(workplace)
    files = write_federation_files(workplace, cell.run_file, machines, port)
    written.touch()
    return files


async def _run_id(operator: OperatorClient, files: DemoFiles) -> str:
    """Return the run's id: the stored run, resumed if it has stopped, or a new run."""
    status = await operator.newest_run()
    if status is not None:
        if status.state in (operator_pb2.RUN_STATE_STOPPED, operator_pb2.RUN_STATE_FAILED):
            await operator.resume_run(status.run_id)
        return status.run_id
    return await operator.start_run(files.run_file)


class _Counter:
    """A display of a run that only reports the number of rounds."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def __enter__(self) -> _Counter:
        return self

    def __exit__(self, *details: object) -> None:
        return None

    def show(self, view: RunView, event: operator_pb2.WatchRunResponse) -> None:
        """Report the number of committed rounds."""
        if event.WhichOneof("event") == "committed":
            self._progress(len(view.committed))

    def connection(self, text: str, *, lost: bool) -> None:
        """Ignore changes of the connection."""


def _result(
    cell: Cell, view: RunView, costs: CellCosts, label_mix: LabelMix, seconds: float
) -> CellResult:
    rounds = view.rounds
    simulated = cell.simulated
    return CellResult(
        labels=dict(cell.labels),
        digest=cell.digest,
        run_file=cell.run_file,
        clients=cell.clients,
        hosts=cell.hosts,
        rounds=[_round(each, costs, label_mix, simulated=simulated) for each in rounds],
        model_blake3=rounds[-1].model if rounds else "",
        version=software_version(),
        timings=Timings(rounds=[each.seconds for each in rounds], total=seconds),
        model_bytes=costs.model_bytes,
        strategy_bytes=costs.strategy_bytes,
        before=costs.before,
        epsilon=costs.epsilon,
    )


def _round(
    committed: Round, costs: CellCosts, label_mix: LabelMix, *, simulated: bool
) -> RoundResult:
    metrics = {name: committed.measures.get(name) for name in OWN_FIELDS}
    spread = committed.spreads.get(_ACCURACY)
    coverage = {name: each for name, each in committed.coverage.items() if name in metrics}
    if spread is not None:
        coverage["worst_tenth"] = spread.coverage
    return RoundResult(
        round=committed.number,
        selected=list(committed.cohort),
        included=list(committed.included),
        entropy=label_mix.entropy(committed.included),
        bytes_down=committed.bytes_down,
        bytes_up=committed.bytes_up,
        downloads=costs.downloads.get(committed.number, 0),
        simulated_seconds=committed.seconds if simulated else None,
        worst_tenth=None if spread is None else spread.worst_tenth,
        coverage={name: CoverageSummary.of(each) for name, each in coverage.items()},
        **metrics,
    )
