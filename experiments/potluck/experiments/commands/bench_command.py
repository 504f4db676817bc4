"""`potluck bench`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from potluck.common.errors import ConfigurationError, RunError
from potluck.common.process.capacity import available_processors
from potluck.deploy.terminal import terminal
from potluck.deploy.view.readable import readable_count, readable_seconds
from potluck.experiments.commands.experiment_command import FOLDERS
from potluck.experiments.commands.grid_work import (
    Data,
    Device,
    ExperimentCommand,
    GridWork,
    Jobs,
    Ray,
    RayChoice,
    RayGpus,
    data_folder,
    run_work,
)

if TYPE_CHECKING:
    from potluck.experiments.benchmark.standing import ArmResult
    from potluck.experiments.benchmark.tier import Tier
    from potluck.experiments.grid.grid_cells import Cell
    from potluck.experiments.grid.results import CellResult

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command("bench", cls=ExperimentCommand)
def bench(
    selectors: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SELECTOR", help="Names of selectors to run. Default: all arms of the tier."
        ),
    ] = None,
    tier: Annotated[
        str, typer.Option(help="Size of the benchmark: smoke, standard or full.")
    ] = "smoke",
    grid: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="TOML file of option values to choose from when tuning.",
            show_default=False,
        ),
    ] = None,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Print the expected time, without running any cell.")
    ] = False,
    jobs: Jobs = None,
    data: Data = None,
    device: Device = "cpu",
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder for the results. Default: potluck-experiments/bench-TIER.",
            show_default=False,
        ),
    ] = None,
    ray: Ray = None,
    ray_gpus: RayGpus = 0.0,
) -> None:
    """Run the benchmark of selection and print the leaderboard.

    Every selector is tuned with the same budget, then runs in all workloads of the tier. The
    leaderboard also shows the results that come with Potluck. Finished cells are kept, so the same
    command continues after an interruption. The result is written to `results/SELECTOR.json`.

    ```console
    potluck bench my-choice
    potluck bench my-choice --grid grid.toml
    potluck bench --tier standard --estimate
    ```
    """
    from potluck.experiments.benchmark.tier import is_published, tier_named, with_grid

    plan = tier_named(tier)
    arms = selectors or list(plan.arms)
    if grid is not None:
        if len(arms) != 1 or arms[0] == plan.baseline:
            raise ConfigurationError(
                "--grid is for the options of one selector; name one that is not the baseline"
            )
        plan = with_grid(plan, arms[0], grid)
    if estimate:
        first = not is_published(plan.name, plan.baseline)
        typer.echo(_estimate(plan, arms, jobs, baseline=first))
        return
    from potluck.experiments.benchmark.contestants import data_digests, run_arms
    from potluck.experiments.benchmark.leaderboard import comparable, leaderboard, tuning_note
    from potluck.experiments.benchmark.standing import published, write_result
    from potluck.experiments.grid.results import ResultsFolder

    known = published(plan)
    sources = data_folder(data)
    digests = data_digests(plan, sources)
    cluster = RayChoice(ray, gpus=ray_gpus, apart=False)
    folder = ResultsFolder(output or FOLDERS / f"bench-{plan.name}")
    console = terminal(stderr=True)

    def run(cells: Sequence[Cell], purpose: str) -> Mapping[str, CellResult]:
        console.print(f"{purpose}: {readable_count(len(cells), 'cell')}", highlight=False)
        work = GridWork(list(cells), folder, sources, device, jobs)
        outcome = run_work(work, cluster, console)
        if outcome.failures:
            first = next(iter(outcome.failures.values()))
            raise RunError(
                f"{readable_count(len(outcome.failures), 'cell')} failed, the first because "
                f"{first.message}; run the same command again after a correction"
            )
        return outcome.results

    with folder.opened():
        results = run_arms(plan, arms, known.get(plan.baseline), run, data=digests)
    paths = [write_result(each, folder.folder / "results") for each in results]
    merged = {**known, **{each.arm: each for each in results}}
    shown = comparable(list(merged.values()), merged[plan.baseline])
    own = results[-1].arm if len(arms) == 1 else None
    typer.echo(leaderboard(plan, shown, marked=own).rstrip())
    if len(shown) < len(merged):
        typer.echo(f"\n{_left_out(merged, shown)}")
    if own is not None and own != plan.baseline:
        typer.echo(f"\n{tuning_note(plan, merged[own])}")
    typer.echo("\n" + "\n".join(map(str, paths)))
    if own is not None and own not in known:
        typer.echo("next: docs/guides/add-to-the-leaderboard.md says how to publish the row")


def _left_out(merged: Mapping[str, ArmResult], shown: Sequence[ArmResult]) -> str:
    names = sorted(set(merged) - {each.arm for each in shown})
    return f"not shown, since they had other data, training settings or targets: {', '.join(names)}"


def _estimate(tier: Tier, arms: Sequence[str], jobs: int | None, *, baseline: bool) -> str:
    from potluck.experiments.benchmark.tier import estimate

    found = estimate(tier, arms, baseline=baseline)
    processors = min(available_processors(), jobs or available_processors())
    return (
        f"{readable_count(found.cells, 'cell')}, about {readable_seconds(found.seconds)} of one "
        f"processor; {readable_seconds(found.seconds / processors)} on "
        f"{readable_count(processors, 'idle processor')}. Selectors that ask clients take longer. "
        "Finished cells are counted, but not run again."
    )
