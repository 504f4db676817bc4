"""Checks of disclosures before they are used. Pure.

A payload comes from somebody else's machine: wrong lengths, NaN, negative exact counts, shares
outside [0, 1] and numbers beyond all data sets are refused with a reason, whoever signed them.
"""

from __future__ import annotations

from typing import Annotated, Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from potluck.common.disclosure import INTERACTION_MATRIX, LABEL_COUNTS, TRIPLET, Parameters
from potluck.common.errors import ProtocolError

Floats = NDArray[np.float64]

MOST_SAMPLES = 1 << 40
"""Counts beyond this, with or without noise, are none of a data set."""

MOST_PAYLOAD_BYTES = 1 << 20

_Count = Annotated[int, Field(strict=True, ge=-MOST_SAMPLES, le=MOST_SAMPLES)]
_Share = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]


class _Payload(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _LabelCounts(_Payload):
    label_counts: tuple[_Count, ...]


class _Triplet(_Payload):
    triplet: tuple[_Share, _Share, _Share]
    degenerate: bool | None = None


class _InteractionMatrix(_Payload):
    interaction_matrix: tuple[tuple[_Count, _Count], ...]


def read_payload(signal: str, parameters: Parameters, text: str, *, classes: int) -> Floats:
    """The numbers of a disclosure: `classes` counts, three shares, or classes × 2 counts.

    Raises ProtocolError for anything else; counts may be negative only where noise was added.
    """
    if len(text) > MOST_PAYLOAD_BYTES:
        raise ProtocolError(f"a {signal} profile of {len(text)} characters is too large")
    try:
        if signal == TRIPLET:
            return np.array(_Triplet.model_validate_json(text).triplet, dtype=np.float64)
        if signal == LABEL_COUNTS:
            counts: Any = _LabelCounts.model_validate_json(text).label_counts
        elif signal == INTERACTION_MATRIX:
            counts = _InteractionMatrix.model_validate_json(text).interaction_matrix
        else:
            _refuse(signal, "there is no such signal")
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in fault["loc"])
        _refuse(signal, f"{place}: {fault['msg']}" if place else str(fault["msg"]))
    if len(counts) != classes:
        _refuse(signal, f"it has {len(counts)} entries for {classes} classes")
    numbers = np.array(counts, dtype=np.float64)
    if not parameters.mode.adds_noise and bool((numbers < 0).any()):
        _refuse(signal, "a count is negative, though no noise was added")
    return numbers


def _refuse(signal: str, why: str) -> NoReturn:
    raise ProtocolError(f"a {signal} profile makes no sense: {why}", signal=signal)
