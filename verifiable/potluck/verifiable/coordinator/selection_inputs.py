"""The inputs of a selection as files, with which an auditor can repeat the selection.

A description (JSON) names each array and each long list by its digest. Files are stored by these
digests, so inputs that do not change from round to round are stored once.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from potluck.common.run_file.runfile import RunFile
from potluck.server.selection import (
    Answers,
    Judgement,
    Population,
    RoundOutcome,
    Rows,
    SelectionContext,
    UpdateFacts,
)
from potluck.server.state import State
from potluck.verifiable.documents import digest

_KIND: Final = "inputs"
_PART: Final = "input part"
_STATE: Final = "selector state"

PER_CLIENT: Final = ("samples", "label_counts", "triplets", "interaction_matrices")
"""Fields of `Population` with one row per client."""

_COLUMNS: Final = (*PER_CLIENT, "label_totals")

_OF_ROUND: Final = (
    *("selected", "cohort", "included", "seconds", "samples"),
    *("spared", "prolonged", "late", "late_seconds"),
)
"""Fields of `RoundOutcome` that are arrays."""

_OF_UPDATES: Final = (
    *("rows", "samples", "steps", "gram", "sketches", "output_moves", "norms", "shares"),
)
"""Fields of `UpdateFacts` that are arrays."""

Read = Callable[[str], bytes]
"""Function that returns the bytes of a stored part (an array or a list), given its digest. Raises
StorageError."""


def part_sha256(content: bytes) -> str:
    """Return the digest under which a part (an array or a list) is stored."""
    return digest(_PART, content)


def inputs_sha256(description: str) -> str:
    """Return the digest of a description, as in `Opening.inputs_sha256`."""
    return digest(_KIND, description.encode())


def state_sha256(state: State) -> str:
    """Return the digest of a selector's state: all scalars and arrays, in any order."""
    arrays = {name: part_sha256(_packed(values)) for name, values in state.arrays.items()}
    return digest(_STATE, _json({"scalars": dict(state.scalars), "arrays": arrays}).encode())


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Inputs of a selection, except seed and available clients, or the facts about a round. parts:
    arrays and lists, as bytes, by their digest."""

    description: str
    parts: Mapping[str, bytes]


class _Parts:
    """Collects parts. content: their bytes, by digest."""

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}

    def put(self, content: bytes) -> str:
        """Add a part; return its digest."""
        sha256 = part_sha256(content)
        self.content[sha256] = content
        return sha256


def described(run_file: RunFile, state: State, context: SelectionContext) -> Inputs:
    """Return the inputs of a selection. state: the selector's state."""
    parts = _Parts()

    def array(values: NDArray[Any] | None) -> str | None:
        return None if values is None else parts.put(_packed(values))

    population = context.population
    description = {
        "selector": run_file.selector.name,
        "options": run_file.selector.options,
        "round": context.round,
        "rounds": context.rounds,
        "count": context.count,
        "spares": context.spares,
        "epochs": context.epochs,
        "tensors": list(context.tensors),
        "late": context.late.tolist(),
        "classes": population.classes,
        "ids": parts.put(json.dumps(list(population.ids)).encode()),
        "columns": {name: array(getattr(population, name)) for name in _COLUMNS},
        "signals": {name: array(column) for name, column in population.signals.items()},
        "scalars": dict(state.scalars),
        "arrays": {name: array(values) for name, values in state.arrays.items()},
    }
    return Inputs(description=_json(description), parts=parts.content)


def restored(
    description: str, read: Read, *, seed: int, available: Sequence[str]
) -> tuple[SelectionContext, State]:
    """Return context and state of a selection. available: clients to choose from.

    Raises StorageError, and KeyError, TypeError or ValueError if the description is malformed.
    """
    found = json.loads(description)
    ids = json.loads(read(found["ids"]))
    rows = {client: row for row, client in enumerate(ids)}

    def array(sha256: str | None) -> Any:
        return None if sha256 is None else _unpacked(read(sha256))

    population = Population(
        ids=ids,
        classes=found["classes"],
        signals={name: _unpacked(read(each)) for name, each in found["signals"].items()},
        **{name: array(sha256) for name, sha256 in found["columns"].items()},
    )
    context = SelectionContext(
        round=found["round"],
        seed=seed,
        count=found["count"],
        population=population,
        available=_rows([rows[client] for client in available]),
        rounds=found["rounds"],
        spares=found["spares"],
        epochs=found["epochs"],
        tensors=found["tensors"],
        late=_rows(found["late"]),
    )
    arrays = {name: _unpacked(read(sha256)) for name, sha256 in found["arrays"].items()}
    return context, State(scalars=found["scalars"], arrays=arrays)


def described_outcome(outcome: RoundOutcome) -> Inputs:
    """Return the facts about a round from which a selector learns."""
    parts = _Parts()

    def named(values: Mapping[str, NDArray[Any]]) -> dict[str, str]:
        return {name: parts.put(_packed(column)) for name, column in values.items()}

    def columns(of: object, names: Sequence[str]) -> dict[str, str]:
        return named({name: getattr(of, name) for name in names})

    facts, judgement = outcome.facts, outcome.judgement
    description = {
        "round": outcome.round,
        "deadline_seconds": outcome.deadline_seconds,
        "arrays": columns(outcome, _OF_ROUND),
        "reports": named(outcome.reports),
        "answers": [
            {**named({"rows": each.rows}), "values": named(each.values)} for each in outcome.answers
        ],
        "facts": None
        if facts is None
        else {"round": facts.round, "seed": facts.seed, "arrays": columns(facts, _OF_UPDATES)},
        "set_aside": {str(row): reason for row, reason in judgement.set_aside.items()},
        "judged": named(judgement.values),
    }
    return Inputs(description=_json(description), parts=parts.content)


def restored_outcome(description: str, read: Read) -> RoundOutcome:
    """Return the facts about a round.

    Raises StorageError, and KeyError, TypeError or ValueError if the description is malformed.
    """
    found = json.loads(description)

    def arrays(of: Mapping[str, str]) -> dict[str, Any]:
        return {name: _unpacked(read(sha256)) for name, sha256 in of.items()}

    facts = found["facts"]
    return RoundOutcome(
        round=found["round"],
        deadline_seconds=found["deadline_seconds"],
        reports=arrays(found["reports"]),
        answers=tuple(
            Answers(rows=_unpacked(read(each["rows"])), values=arrays(each["values"]))
            for each in found["answers"]
        ),
        facts=None
        if facts is None
        else UpdateFacts(round=facts["round"], seed=facts["seed"], **arrays(facts["arrays"])),
        judgement=Judgement(
            set_aside={int(row): reason for row, reason in found["set_aside"].items()},
            values=arrays(found["judged"]),
        ),
        **arrays(found["arrays"]),
    )


def _rows(rows: Sequence[int]) -> Rows:
    return np.array(rows, dtype=np.int64)


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _packed(values: NDArray[Any]) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, np.ascontiguousarray(values), allow_pickle=False)
    return file.getvalue()


def _unpacked(content: bytes) -> NDArray[Any]:
    found: NDArray[Any] = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
    return found
