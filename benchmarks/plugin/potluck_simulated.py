"""The cases of `simulation.py` as a task."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from simulation_cases import CASES, CLASSES, Case

from potluck.common.names import ClientId
from potluck.common.task import ClientData, Examples, Task


@cache
def _examples(case: str, client: int) -> Examples:
    """Return a client's samples, made once per process, as in all measured systems."""
    inputs, labels = CASES[case].data(client)
    return Examples(inputs=inputs, labels=labels)


@dataclass(frozen=True, kw_only=True)
class Simulated(Task):
    """The task of a named case."""

    case: str

    classes = CLASSES

    @property
    def _case(self) -> Case:
        return CASES[self.case]

    def model(self) -> Any:
        """Return the case's network."""
        return self._case.network()

    def client_data(self, client: ClientId, data: Path | None) -> ClientData:
        """Return the samples of the client's number."""
        return ClientData(train=_examples(self.case, int(client.rpartition("-")[2])))

    def evaluation_data(self, data: Path | None) -> Examples | None:
        """Return None: nothing is evaluated."""
        return None
