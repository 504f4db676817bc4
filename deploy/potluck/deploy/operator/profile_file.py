"""Profile files: what the clients of a federation disclosed, as JSON.

    {"classes": 3, "clients": [
      {"id": "a", "samples": 40, "label_counts": [10, 0, 30], "triplet": [0.3, 0.1, 0.5],
       "interaction_matrix": [[5, 5], [0, 0], [20, 10]]}]}

A client needs only an `id`. `classes` may be omitted if a client has label counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal, NotRequired

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from potluck.common.errors import ConfigurationError
from potluck.common.settings.wanted import wanted
from potluck.server.selection import Population

Floats = NDArray[np.float64]

_Count = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
_Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False, strict=True)]
_STRICT = ConfigDict(extra="forbid")


@with_config(_STRICT)
class _Client(TypedDict):
    id: Annotated[str, Field(min_length=1)]
    samples: NotRequired[Annotated[int, Field(ge=0, lt=2**63, strict=True)]]
    label_counts: NotRequired[list[_Count]]
    triplet: NotRequired[tuple[_Share, _Share, _Share]]
    interaction_matrix: NotRequired[list[tuple[_Count, _Count]]]


@with_config(_STRICT)
class _File(TypedDict):
    classes: NotRequired[Annotated[int, Field(ge=1, strict=True)]]
    clients: Annotated[list[_Client], Field(min_length=1)]


_ADAPTER = TypeAdapter(_File)


def read_profile_file(path: Path) -> Population:
    """Return the clients of a profile file, in the file's order.

    A column is None if no client has that field. Raises ConfigurationError, with the names of the
    file, the client and the field, if a value is invalid.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{path} can't be read: {error.strerror}", path=path) from error
    try:
        file = _ADAPTER.validate_json(content)
    except ValidationError as error:
        raise ConfigurationError(f"{path}: {_first_fault(error)}", path=path) from None
    clients = file["clients"]
    ids = [client["id"] for client in clients]
    if len(set(ids)) < len(ids):
        repeated = Counter(ids).most_common(1)[0][0]
        raise ConfigurationError(
            f"{path}: client '{repeated}' occurs twice; give every client its own id",
            path=path,
        )
    classes = file.get("classes") or _classes_shown(clients)
    column = _columns(path, clients, classes)
    return Population(
        ids=ids,
        classes=classes,
        samples=np.array([client.get("samples", 0) for client in clients], dtype=np.int64),
        label_counts=column("label_counts", (classes,)),
        triplets=column("triplet", (3,)),
        interaction_matrices=column("interaction_matrix", (classes, 2)),
    )


def _classes_shown(clients: Sequence[_Client]) -> int:
    for client in clients:
        counts = client.get("label_counts") or client.get("interaction_matrix")
        if counts:
            return len(counts)
    return 1


_Field = Literal["label_counts", "triplet", "interaction_matrix"]


def _columns(
    path: Path, clients: Sequence[_Client], classes: int
) -> Callable[[_Field, tuple[int, ...]], Floats | None]:
    def column(name: _Field, shape: tuple[int, ...]) -> Floats | None:
        values = [client.get(name) for client in clients]
        holders = [row for row, value in enumerate(values) if value is not None]
        for row in holders:
            length = len(values[row] or ())
            if length != shape[0]:
                raise ConfigurationError(
                    f"{path}: {name} of client '{clients[row]['id']}' has {length} entries "
                    f"for {classes} classes; give one per class",
                    path=path,
                )
        if not holders:
            return None
        if len(holders) == len(clients):
            return np.array(values, dtype=np.float64)
        result = np.full((len(clients), *shape), np.nan)
        result[holders] = [values[row] for row in holders]
        return result

    return column


def _first_fault(error: ValidationError) -> str:
    fault = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in fault["loc"])
    reason = wanted(fault)
    reason = reason[:1].lower() + reason[1:]
    given = fault["input"]
    shown = (
        f", not {given!r}" if isinstance(given, int | float | str) and len(str(given)) < 40 else ""
    )
    return f"{place}: {reason}{shown}" if place else f"{reason}"
