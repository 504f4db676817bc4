"""`potluck new`: packages to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from potluck.experiments.templates.selector_package import write_selector_package

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Write a package of your own to start from.",
)


@app.callback()
def new() -> None:
    """Write a package of your own to start from."""


@app.command()
def selector(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="Name of the selector in run files, such as rare-first.",
            show_default=False,
        ),
    ],
    into: Annotated[
        Path,
        typer.Option("--into", metavar="FOLDER", help="Folder in which to make the package."),
    ] = Path(),
) -> None:
    """Write a package with a selector, its tests and a README.

    The package can be installed and its tests pass; change the rule in it to your own.

    ```console
    potluck new selector rare-first
    potluck new selector rare-first --into ~/selectors
    ```
    """
    folder = write_selector_package(name, into)
    typer.echo(f"{folder}: the selector {name}, its tests and a README")
    typer.echo(f"next: pip install -e {folder}")
