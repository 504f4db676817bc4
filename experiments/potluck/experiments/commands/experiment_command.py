"""`potluck experiment`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from potluck.common.errors import ConfigurationError, RunError
from potluck.deploy.commands.run_commands import print_line
from potluck.deploy.local.interruption import run_interruptibly
from potluck.deploy.terminal import terminal
from potluck.deploy.view.readable import readable_count

if TYPE_CHECKING:
    from potluck.experiments.grid.definition import ExperimentFile
    from potluck.experiments.grid.grid_cells import Cell
    from potluck.experiments.grid.results import CellResult, ResultsFolder
    from potluck.experiments.grid.running import GridOutcome

_FOLDERS = Path("potluck-experiments")
_DATA = Path("data")


def experiment(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="The experiment file.", show_default=False)
    ],
    quick: Annotated[
        bool, typer.Option("--quick", help="Apply the file's [quick] table: smaller, sooner done.")
    ] = False,
    hosts: Annotated[
        int | None,
        typer.Option(min=1, help="Client processes of each federation, instead of the file's."),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1, help="Cells side by side; left out: as many as processors and memory carry."
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Where the tasks find their data; ./data if left out.",
            show_default=False,
        ),
    ] = None,
    device: Annotated[
        str,
        typer.Option(help="What the hosts train on: cpu, auto (a GPU if there is one), cuda:N."),
    ] = "cpu",
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Where results go, and are found again; potluck-experiments/NAME if left out.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the cells, and which are finished; run none.")
    ] = False,
    report_only: Annotated[
        bool, typer.Option("--report-only", help="Report what is finished; run nothing.")
    ] = False,
) -> None:
    """Run a grid of settings × seeds and write a report.

    Every cell is a federation of its own: a coordinator and some hosts with certificates, as they
    would be on many machines. Finished cells are kept: after Ctrl-C, a crash or a change of the
    file, the same command runs what is missing, and goes on with cells that were under way.

    The folder gets `report.html`, `report.md`, `rounds.parquet` and `rounds.csv` (a row for each
    cell and round, the same whenever the experiment is run) and `timings.csv`.

    ```console
    potluck experiment experiments/dc-mnist.toml --quick --data data
    potluck experiment mine.toml --dry-run
    ```
    """
    from potluck.experiments.grid.definition import load_experiment
    from potluck.experiments.grid.grid_cells import cells_of
    from potluck.experiments.grid.results import ResultsFolder
    from potluck.experiments.grid.running import GridOutcome

    plan = load_experiment(file, quick=quick)
    cells = cells_of(plan, hosts=hosts or plan.hosts, source=file)
    name = f"{plan.name}-quick" if quick else plan.name
    folder = ResultsFolder(output or _FOLDERS / name)
    console = terminal(stderr=True)
    for each in plan.assumptions():
        console.print(
            f"ours, not the paper's: {each.key}: {each.reason}", style="dim", markup=False,
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    if dry_run:
        _list(cells, folder)
        return
    if report_only:
        outcome = GridOutcome(results=folder.finished(cells), failures={})
    else:
        with folder.opened():
            outcome = _run(cells, folder, console, _data_folder(data), device, jobs)
    _write(plan, cells, outcome.results, folder)
    if outcome.failures:
        first = next(iter(outcome.failures.values()))
        raise RunError(
            f"{readable_count(len(outcome.failures), 'cell')} failed, the first because "
            f"{first.message}; the same command tries them again"
        )


def _data_folder(named: Path | None) -> Path | None:
    """The folder that was named, else ./data where there is one."""
    if named is None and _DATA.is_dir():
        return _DATA
    return named


def _list(cells: list[Cell], folder: ResultsFolder) -> None:
    finished = folder.finished(cells)
    for cell in cells:
        under_way = folder.workplace(cell).exists()
        state = "finished" if cell.digest in finished else "under way" if under_way else "to run"
        print_line(f"{state:9}  {cell.title}  ({readable_count(cell.rounds, 'round')})")
    print_line(f"{readable_count(len(cells), 'cell')}, {len(finished)} finished")


def _run(
    cells: list[Cell],
    folder: ResultsFolder,
    console: Console,
    data: Path | None,
    device: str,
    jobs: int | None,
) -> GridOutcome:
    from potluck.experiments.grid.experiment_progress import Board
    from potluck.experiments.grid.running import (
        Place,
        available_memory,
        available_processors,
        jobs_for,
        run_missing,
    )

    most = jobs or jobs_for(
        max(cell.hosts for cell in cells),
        len(cells),
        processors=available_processors(),
        memory=available_memory(),
    )
    place = Place(device=device, data=data, jobs=most)
    with Board(console) as board:
        return run_interruptibly(run_missing(cells, folder, place, board))


def _write(
    plan: ExperimentFile, cells: list[Cell], results: dict[str, CellResult], folder: ResultsFolder
) -> None:
    from potluck.experiments.reports.experiment_summary import summarise
    from potluck.experiments.reports.html_report import write_report
    from potluck.experiments.reports.tables import markdown, write_tables

    done = [
        results[cell.digest].model_copy(update={"labels": dict(cell.labels)})
        for cell in cells
        if cell.digest in results
    ]
    if not done:
        raise ConfigurationError(
            f"no cell is finished in {folder.folder}; there is nothing to report"
        )
    named = [
        result.model_copy(update={"labels": dict(cell.labels)})
        for cell, result in zip((c for c in cells if c.digest in results), done, strict=True)
    ]
    summary = summarise(plan, named, len(cells) - len(done))
    write_tables(named, folder.folder)
    text = markdown(summary)
    (folder.folder / "report.md").write_text(text, encoding="utf-8")
    write_report(summary, folder.folder / "report.html")
    print_line(text.rstrip())
    print_line("")
    print_line(f"{folder.folder / 'report.html'}")
