"""Runs cells on a Ray cluster: an actor runs one cell after the other; a lost actor is replaced."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from typing_extensions import override

from potluck.common.errors import ConfigurationError, RunError
from potluck.experiments.cluster.cell_actor import ENDED, CellActor
from potluck.experiments.cluster.cell_needs import CellNeed, need_of, places_for, shortage
from potluck.experiments.cluster.cell_report import CellWork, SentFile, result_of, software
from potluck.experiments.cluster.host_actor import HostActor, lost
from potluck.experiments.cluster.ray_cluster import resources
from potluck.experiments.cluster.sent_data import DataFile, DataFiles
from potluck.experiments.grid.cell_run import Progress
from potluck.experiments.grid.grid_cells import Cell
from potluck.experiments.grid.label_mix import LabelMix
from potluck.experiments.grid.results import CellResult, ResultsFolder
from potluck.experiments.grid.running import CellRunner

PIECE_BYTES = 32 * 2**20
"""Size in bytes of a data file's pieces in Ray's object store."""

END_SECONDS = 20.0
"""Seconds that an actor has to end a cell's processes before the driver kills them."""

_THREADS = 4
"""Number of threads of an actor: one runs a cell, one reports rounds, one can end the cell, and one
is spare."""


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Options for the use of the cluster.

    jobs: maximum number of parallel cells; None for as many as the cluster can run. gpus: GPUs per
    host, possibly a fraction. apart: True to place hosts on different machines.
    """

    device: str
    jobs: int | None
    gpus: float
    apart: bool


@dataclass(kw_only=True, eq=False)
class _Seat:
    """Resources reserved for cells with `hosts` hosts, and the actors that use them."""

    hosts: int
    group: Any
    actor: Any
    host_actors: Sequence[Any]
    given: int = field(default=0)

    def leave(self) -> None:
        """Release the resources. This ends the actors and their processes."""
        with contextlib.suppress(RayError):
            for actor in (*self.host_actors, self.actor):
                ray.kill(actor)
            remove_placement_group(self.group)


class RayCells(CellRunner):
    """Runs cells on the machines of the cluster that this process is connected to.

    A cell always runs from its start, since the state of a lost machine is lost. So its results
    equal those of a cell that was never interrupted.
    """

    def __init__(self, folder: ResultsFolder, data: Path | None, options: ClusterOptions) -> None:
        self._folder, self._options = folder, options
        self._files = DataFiles(data)
        self._has_data = data is not None
        self._sent: dict[str, SentFile] = {}
        self._sending = asyncio.Lock()
        self._free: list[_Seat] = []
        self._taken: set[_Seat] = set()
        self._need = need_of(1, gpus=options.gpus, apart=options.apart)

    def check(self, cells: Sequence[Cell]) -> None:
        """Raise ConfigurationError unless the cluster can run each of these cells."""
        hosts = max((cell.hosts for cell in cells), default=1)
        self._need = self._need_of(hosts)
        if lacking := shortage(self._need, resources()):
            raise ConfigurationError(
                f"a cell of the experiment {lacking}; add machines to the cluster, or reduce the "
                f"need of a cell with --hosts{' or --ray-gpus' if self._options.gpus else ''}"
            )

    @override
    def places(self) -> int:
        """Return --jobs if set; otherwise the number of cells that the cluster can run now."""
        return max(1, self._options.jobs or places_for(self._need, resources()))

    @override
    async def run(self, cell: Cell, label_mix: LabelMix, progress: Progress) -> CellResult:
        """Run a cell on the cluster. Raises RunError, CellLostError."""
        data = await self._data_of(cell)
        seat = self._seat(cell.hosts)
        self._taken.add(seat)
        seat.given += 1
        work = CellWork(
            number=seat.given,
            cell=cell,
            device=self._options.device,
            counts=np.asarray(label_mix.counts),
            data=data,
            host_actors=seat.host_actors,
            software=software(),
        )
        unharmed = False
        try:
            result = self._result(cell, await _watched(seat, work, progress))
            unharmed = True
        except RayError as error:
            raise lost(cell.title, error) from None
        except RunError:
            raise
        except BaseException:
            await _end(seat)
            raise
        finally:
            self._give_back(seat, unharmed=unharmed)
        progress(cell.rounds)
        return result

    @override
    async def keep_for(self, cells: int) -> None:
        """Release resources that no running cell needs."""
        while self._free and len(self._free) + len(self._taken) > cells:
            await self._dismiss(self._free.pop())

    @override
    async def close(self) -> None:
        """Release all resources."""
        seats = [*self._free, *self._taken]
        self._free.clear()
        await asyncio.gather(*(self._dismiss(seat) for seat in seats))

    async def _dismiss(self, seat: _Seat) -> None:
        await _end(seat)
        seat.leave()

    def _give_back(self, seat: _Seat, *, unharmed: bool) -> None:
        self._taken.remove(seat)
        if unharmed:
            self._free.append(seat)  # `keep_for` or `close` releases it at the latest
        else:
            seat.leave()

    def _need_of(self, hosts: int) -> CellNeed:
        return need_of(hosts, gpus=self._options.gpus, apart=self._options.apart)

    def _seat(self, hosts: int) -> _Seat:
        """Return a seat for a cell, free or new. Raises RunError if resources are missing.

        Free seats for other numbers of hosts are released: a new seat may need their resources.
        """
        for seat in self._free:
            if seat.hosts == hosts:
                self._free.remove(seat)
                return seat
        while self._free:
            self._free.pop().leave()
        need = self._need_of(hosts)
        if lacking := shortage(need, resources()):
            raise RunError(f"the cell of the experiment {lacking} now")
        return _reserved(hosts, need)

    def _result(self, cell: Cell, text: str) -> CellResult:
        result, error, report = result_of(text, cell)
        if result is not None:
            return result
        workplace = self._folder.workplace(cell)
        for name, log in report.logs.items():
            workplace.mkdir(exist_ok=True)
            (workplace / Path(name).name).write_text(log)
        if error is None:
            raise RunError("the run of the cell ended without a result")
        if report.logs:
            raise RunError(f"{error.message}; see the logs in {workplace}", folder=workplace)
        raise error

    async def _data_of(self, cell: Cell) -> list[SentFile] | None:
        """Return the cell's data files in the object store; None if there is no data directory."""
        if not self._has_data:
            return None
        async with self._sending:
            return await asyncio.to_thread(
                lambda: [self._in_store(file) for file in self._files.of(cell)]
            )

    def _in_store(self, file: DataFile) -> SentFile:
        if file.blake3 not in self._sent:
            pieces = []
            with self._files.location(file).open("rb") as source:
                read: Callable[[], bytes] = partial(source.read, PIECE_BYTES)
                for piece in iter(read, b""):
                    pieces.append(ray.put(np.frombuffer(piece, dtype=np.uint8)))
            self._sent[file.blake3] = SentFile(file=file, pieces=pieces)
        return SentFile(file=file, pieces=self._sent[file.blake3].pieces)


def _reserved(hosts: int, need: CellNeed) -> _Seat:
    """Reserve all resources that a cell needs, and create the actors that use them."""
    group = placement_group([dict(each) for each in need.bundles], strategy=need.strategy)
    environment = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS")}

    def actor(kind: type, bundle: int) -> Any:
        part = need.bundles[bundle]
        remote: Any = ray.remote(kind)
        options = remote.options(
            num_cpus=part["CPU"],
            num_gpus=part.get("GPU", 0),
            max_concurrency=_THREADS,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=bundle
            ),
        )
        return options.remote(environment)

    return _Seat(
        hosts=hosts,
        group=group,
        actor=actor(CellActor, 0),
        host_actors=[actor(HostActor, each) for each in range(1, len(need.bundles))],
    )


async def _watched(seat: _Seat, work: CellWork, progress: Progress) -> str:
    """Run a cell on an actor, report its progress, and return the actor's report."""
    telling = asyncio.create_task(_tell(seat, work.number, progress))
    try:
        report: str = await seat.actor.run.remote(work)
        return report
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)


async def _tell(seat: _Seat, number: int, progress: Progress) -> None:
    known = 0
    while (now := await seat.actor.rounds.remote(number, known)) != ENDED:
        known = now
        progress(known)


async def _end(seat: _Seat) -> None:
    """Make actors end their processes; actors that take too long are killed afterwards."""
    actors = (seat.actor, *seat.host_actors)
    with contextlib.suppress(RayError, TimeoutError):
        async with asyncio.timeout(END_SECONDS):
            await asyncio.gather(*(_ended(actor) for actor in actors), return_exceptions=True)


async def _ended(actor: Any) -> None:
    await actor.leave.remote()
