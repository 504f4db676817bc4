"""Costs of a cell's rounds as if each client were its own machine.

They are computed from the coordinator's records. The clients of an experiment share a few hosts,
and a host fetches a model once for all of them. So the bytes that were actually sent don't show the
costs of a federation whose clients are on separate machines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from potluck.common.disclosure import TRIPLET, parse_parameters
from potluck.common.settings import plugins
from potluck.common.tensors.encoding import Encoding
from potluck.common.tensors.model_arrays import state_arrays
from potluck.experiments.grid.grid_cells import Cell
from potluck.experiments.grid.results import Before
from potluck.server.rounds.plan import draw_up
from potluck.server.rounds.pretraining import pretraining_id
from potluck.server.store import Store
from potluck.server.store.records import Exchange, RoundRow
from potluck.server.strategy import Strategy, Weights

_SHARE = {Encoding.FLOAT32: 1.0, Encoding.BFLOAT16: 0.5, Encoding.INT8: 0.25}


@dataclass(frozen=True, kw_only=True)
class CellCosts:
    """Costs of a cell's run.

    downloads: number of clients that needed the model, by round. model_bytes: size of the model's
    tensors as encoded for a client. strategy_bytes: size of the data that the strategy sends in
    addition to each client that trains.
    """

    downloads: Mapping[int, int]
    model_bytes: int
    strategy_bytes: int
    before: Before


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
        triplets = store.profiles(signal=TRIPLET)
    simulated = plan.run_file.virtual_clock.enabled
    needed = {row.key.round: asked[row.key.round] | _members(row) for row in rows}
    # A client that estimates a triplet receives the pre-trained model, and can reuse it in round 1.
    estimated = {
        each.client_id
        for each in triplets
        if parse_parameters(each.parameters_json).model is not None
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
    )


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
        return False  # the answer is part of a secure sum
    return bool(plugins.find(plugins.QUESTIONS, kind).needs_model)
