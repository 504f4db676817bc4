"""`potluck privacy`: the privacy loss of a run with noise, before it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Plan the noise of a run, and its privacy loss.", no_args_is_help=True)


@app.callback()
def main() -> None:
    """Plan the noise of a run, and its privacy loss."""


@app.command("plan")
def plan(
    run_file: Annotated[Path, typer.Argument(help="The run file.", show_default=False)],
    samples: Annotated[
        list[int] | None,
        typer.Option(help="Number of a client's samples, for unit = record; repeatable.", min=1),
    ] = None,
    trainings: Annotated[
        int | None,
        typer.Option(help="Number of trainings of a client. Default: the run file's.", min=1),
    ] = None,
    target: Annotated[
        list[float] | None,
        typer.Option(help="ε for which to print the noise; repeatable. Default: 1, 3 and 8."),
    ] = None,
) -> None:
    """Print ε of clients by number of trainings, and the noise for a target.

    Needs the extra `privacy`, and the task's software for its recommended batch size.

    potluck privacy plan run.toml --samples 250 --samples 2000
    """
    from potluck.common.run_file.runfile import parse_run_file
    from potluck.privacy.privacy_plan import plan_lines

    parsed = parse_run_file(run_file.read_text(encoding="utf-8"), source=str(run_file))
    for line in plan_lines(
        parsed,
        samples=samples or (100, 1000, 10_000),
        trainings=trainings,
        targets=target or (1.0, 3.0, 8.0),
        source=str(run_file),
    ):
        typer.echo(line)
