"""Resources that a cell needs, and the number of cells that a cluster can run. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from potluck.experiments.grid.local_cells import BUSY_HOSTS, BYTES_PER_PROCESS

Resources = Mapping[str, float]
"""Amounts as Ray names them: CPU and GPU in units, memory in bytes."""

_BUSY_COORDINATOR = 0.1
"""Share of a processor that is reserved for a coordinator whose hosts are on other machines."""


@dataclass(frozen=True, kw_only=True)
class CellNeed:
    """Resources that a cell needs.

    bundles: resources that must be on the same machine: the coordinator's bundle, then one per
    host; a single bundle if all processes of the cell run together. spread: True if bundles go to
    different machines, as long as there are enough machines; otherwise all bundles go to one
    machine.
    """

    bundles: Sequence[Resources]
    spread: bool

    @property
    def strategy(self) -> Literal["SPREAD", "STRICT_PACK"]:
        """Name of Ray's placement strategy."""
        return "SPREAD" if self.spread else "STRICT_PACK"

    @property
    def total(self) -> Resources:
        """Sum of all bundles."""
        names = {name: None for bundle in self.bundles for name in bundle}
        return {name: sum(each.get(name, 0.0) for each in self.bundles) for name in names}


def need_of(hosts: int, *, gpus: float, apart: bool) -> CellNeed:
    """Return the resources that a cell with `hosts` hosts needs.

    gpus: GPUs per host, possibly a fraction. apart: True to place hosts on different machines.
    Each host with GPUs has its own bundle, so that Ray gives each host its own GPUs.
    """
    if not apart and not gpus:
        memory = (hosts + 1) * BYTES_PER_PROCESS
        return CellNeed(bundles=[{"CPU": hosts * BUSY_HOSTS, "memory": memory}], spread=False)
    coordinator = {"CPU": _BUSY_COORDINATOR, "memory": BYTES_PER_PROCESS}
    host = {"CPU": BUSY_HOSTS, "memory": BYTES_PER_PROCESS} | ({"GPU": gpus} if gpus else {})
    return CellNeed(bundles=[coordinator, *[host] * hosts], spread=apart)


def places_for(need: CellNeed, nodes: Iterable[Resources]) -> int:
    """Return the number of cells that these machines can run at the same time.

    The number is exact if each cell runs on one machine. A cell that is spread over machines may
    have to wait, since free resources can be fragmented.
    """
    if not need.spread:
        return sum(_times(need.total, node) for node in nodes)
    nodes = list(nodes)
    if shortage(need, nodes) is not None:
        return 0
    names = need.total
    return _times(need.total, {name: sum(n.get(name, 0.0) for n in nodes) for name in names})


def shortage(need: CellNeed, nodes: Iterable[Resources]) -> str | None:
    """Return the resources that the machines lack for one cell, as text; None if they can run it.

    Example: "needs 1 GPU, the cluster has 0".
    """
    nodes = list(nodes)
    for name, amount in need.total.items():
        present = sum(node.get(name, 0.0) for node in nodes)
        if _units(present, amount) < 1:
            what = _amount(name, amount)
            return f"needs {what}, but the cluster has {_amount(name, present, unit=False)}"
    parts = need.bundles if need.spread else [need.total]
    for part in parts:
        if not any(_times(part, node) for node in nodes):
            needed = " and ".join(_amount(name, amount) for name, amount in part.items())
            return f"needs {needed} on one machine, but no machine has that much"
    return None


def _times(part: Resources, node: Resources) -> int:
    return min(_units(node.get(name, 0.0), amount) for name, amount in part.items())


def _units(present: float, amount: float) -> int:
    return math.floor(present / amount + 1e-9)  # 0.3 / 0.1 is a little less than 3


def _amount(name: str, amount: float, *, unit: bool = True) -> str:
    if name == "memory":
        return f"{amount / 2**30:.1f} GiB of memory"
    text = f"{round(amount, 4):g}"
    if not unit:
        return text
    return f"{text} {name}" if amount <= 1 else f"{text} {name}s"
