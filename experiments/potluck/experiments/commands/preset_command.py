"""`potluck preset`."""

from __future__ import annotations

from typing import Annotated

import typer

from potluck.experiments.presets import preset_named, preset_names, preset_run_file


def preset(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Name of the preset. Default: list all.")
    ] = None,
) -> None:
    """Print a paper's settings as a run file.

    ```console
    potluck preset
    potluck preset dc > run.toml
    ```
    """
    if name is None:
        for each in preset_names():
            typer.echo(f"{each:20} {preset_named(each).paper}")
        return
    typer.echo(preset_run_file(preset_named(name)).rstrip())
