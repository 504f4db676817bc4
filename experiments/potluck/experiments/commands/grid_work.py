"""Runs the cells of a grid for a command, on this machine or a Ray cluster; the options of both."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand

from potluck.common.errors import ConfigurationError
from potluck.deploy.local.interruption import run_interruptibly

if TYPE_CHECKING:
    from potluck.experiments.grid.grid_cells import Cell
    from potluck.experiments.grid.results import ResultsFolder
    from potluck.experiments.grid.running import CellRunner, GridOutcome

_DATA = Path("data")
_THIS_CLUSTER = "auto"

# Options ------------------------------------------------------------------------------------------

Jobs = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Number of parallel cells. Default: as many as the machine allows.",
    ),
]
Data = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Folder of the tasks' data. Default: ./data.",
        show_default=False,
    ),
]
Device = Annotated[
    str, typer.Option(help="Device for training: cpu, auto (a GPU if there is one), cuda:N.")
]
Ray = Annotated[
    str | None,
    typer.Option(
        metavar="[ADDRESS]",
        help="Run the cells on the Ray cluster at HOST:PORT, or on this machine's cluster. Every "
        "machine needs the extra `ray`.",
        show_default=False,
    ),
]
RayGpus = Annotated[
    float,
    typer.Option(
        min=0.0,
        metavar="SHARE",
        help="Number of GPUs per host on the Ray cluster, such as 0.25 or 1.",
    ),
]
RayHostsApart = Annotated[
    bool,
    typer.Option(
        "--ray-hosts-apart", help="Spread the hosts of each cell over the Ray cluster's machines."
    ),
]


class ExperimentCommand(TyperCommand):
    """A command whose option `--ray` may be given without an address."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; insert "auto" as the cluster's address if `--ray` has none."""
        return super().parse_args(ctx, with_address(args))


def with_address(arguments: list[str]) -> list[str]:
    """Return the arguments with an address after each `--ray`; "auto" is inserted if it has none.

    The next argument is an address if it has a colon or is "auto"; otherwise it is one of the
    command's other arguments.
    """
    found: list[str] = []
    for argument, following in itertools.pairwise([*arguments, ""]):
        found.append(argument)
        if argument == "--ray" and ":" not in following and following != _THIS_CLUSTER:
            found.append(_THIS_CLUSTER)
    return found


def data_folder(named: Path | None) -> Path | None:
    """Return the named folder, else ./data if it exists."""
    if named is None and _DATA.is_dir():
        return _DATA
    return named


# Running ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GridWork:
    """Cells to run, and how to run them."""

    cells: list[Cell]
    folder: ResultsFolder
    data: Path | None
    device: str
    jobs: int | None


class RayChoice:
    """Options of the Ray cluster; without an address, no cluster is used.

    Raises ConfigurationError if other options are set without an address.
    """

    def __init__(self, address: str | None, *, gpus: float, apart: bool) -> None:
        if address is None and (gpus or apart):
            raise ConfigurationError("--ray-gpus and --ray-hosts-apart need a cluster; add --ray")
        if gpus > 1 and gpus != round(gpus):
            raise ConfigurationError(
                f"--ray-gpus must be a fraction of one GPU or a whole number of GPUs, not {gpus:g}",
                gpus=gpus,
            )
        self.address, self.gpus, self.apart = address, gpus, apart


def run_work(work: GridWork, cluster: RayChoice, console: Console) -> GridOutcome:
    """Run the missing cells, and show the progress on a console.

    Raises ConfigurationError if finished cells of the folder read other data.
    """
    from potluck.experiments.grid.cell_data import data_digests

    work.folder.check_data(data_digests(work.cells, work.data))
    if cluster.address is None:
        return _run_cells(work, lambda: _local(work), console)
    from potluck.experiments.cluster.ray_cluster import check_machines, connected

    with connected(cluster.address):
        check_machines()
        return _run_cells(work, lambda: _on_ray(work, cluster), console)


def _run_cells(work: GridWork, runner: Callable[[], CellRunner], console: Console) -> GridOutcome:
    from potluck.experiments.grid.experiment_progress import Board
    from potluck.experiments.grid.label_mix import LabelMixes
    from potluck.experiments.grid.running import run_missing

    mixes = LabelMixes(work.data)

    async def run() -> GridOutcome:
        return await run_missing(work.cells, work.folder, mixes, runner(), board)

    with Board(console) as board:
        return run_interruptibly(run())


def _local(work: GridWork) -> CellRunner:
    from potluck.common.process.capacity import available_memory, available_processors
    from potluck.experiments.grid.local_cells import LocalCells, jobs_for

    most = work.jobs or jobs_for(
        max(cell.hosts for cell in work.cells),
        len(work.cells),
        processors=available_processors(),
        memory=available_memory(),
    )
    return LocalCells(work.folder, device=work.device, data=work.data, jobs=most)


def _on_ray(work: GridWork, cluster: RayChoice) -> CellRunner:
    from potluck.experiments.cluster.ray_cells import ClusterOptions, RayCells

    device = "auto" if cluster.gpus and work.device == "cpu" else work.device
    options = ClusterOptions(device=device, jobs=work.jobs, gpus=cluster.gpus, apart=cluster.apart)
    runner = RayCells(work.folder, work.data, options)
    runner.check(work.cells)
    return runner
