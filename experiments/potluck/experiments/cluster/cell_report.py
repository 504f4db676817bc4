"""Records exchanged with a machine of a cluster: the cell to run, and the report on it. Pure."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from potluck.common.errors import ConfigurationError, ProtocolError, RunError
from potluck.common.net.build_version import software_version
from potluck.experiments.cluster.sent_data import DataFile
from potluck.experiments.grid.grid_cells import Cell
from potluck.experiments.grid.results import CellResult
from potluck.experiments.grid.running import CellLostError

THE_SAME = ("potluck", "ray", "torch", "numpy")
"""Packages whose version may affect a cell's result, or prevent the cell from running."""


@dataclass(frozen=True, kw_only=True)
class SentFile:
    """A data file and the references, in order, to its pieces in Ray's object store."""

    file: DataFile
    pieces: Sequence[Any]


@dataclass(frozen=True, kw_only=True)
class CellWork:
    """A cell to run.

    counts: label counts of the cell's `LabelMix`. host_actors: actors that run its hosts; empty if
    hosts run on the coordinator's machine. number: serial number of the cell among those given to
    the actor.
    """

    number: int
    cell: Cell
    device: str
    counts: NDArray[np.int64]
    data: Sequence[SentFile] | None
    host_actors: Sequence[Any]
    software: Mapping[str, str]


class CellReport(BaseModel):
    """The outcome of a cell. logs: end of each process's log, by name, if the cell failed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    outcome: Literal["finished", "failed", "lost", "refused"]
    result: CellResult | None = None
    reason: str = ""
    logs: dict[str, str] = {}


def software() -> dict[str, str]:
    """Return this machine's versions of the software that must be the same on all machines."""
    python = ".".join(platform.python_version_tuple()[:2])
    found = {name: version(name).partition("+")[0] for name in THE_SAME}  # torch: +cpu, +cu130
    return {"Python": python} | found | {"potluck": software_version()}


def check_software(wanted: Mapping[str, str], found: Mapping[str, str], *, machine: str) -> None:
    """Raise ConfigurationError if a machine's versions differ from `wanted`."""
    for name, expected in wanted.items():
        if found.get(name) != expected:
            raise ConfigurationError(
                f"{machine} has version {found.get(name, '(none)')} of {name}, but this machine "
                f"has version {expected}; install the same version on both machines",
                machine=machine,
                name=name,
            )


def result_of(text: str, cell: Cell) -> tuple[CellResult | None, RunError | None, CellReport]:
    """Read a report on a cell. Return the cell's result, or the error to raise, and the report.

    Raises ProtocolError if the text is not a valid report, ConfigurationError if every machine
    would refuse the cell.
    """
    try:
        report = CellReport.model_validate_json(text)
    except ValidationError as error:
        raise ProtocolError(
            f"{cell.title}: the machine's answer is not a valid report on a cell: {error}"
        ) from None
    if report.outcome == "refused":
        raise ConfigurationError(report.reason)
    if report.outcome == "lost":
        return None, CellLostError(report.reason), report
    if report.outcome == "failed" or report.result is None:
        return None, RunError(report.reason), report
    if report.result.digest != cell.digest:
        raise ProtocolError(
            f"{cell.title}: the machine returned the result of another cell: {report.result.digest}"
        )
    return report.result, None, report
