"""`potluck config`: prints annotated examples of configuration files."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from potluck.common.run_file.runfile import example_run_file
from potluck.deploy.operator.operator_config import example_operator_config

app = typer.Typer()


class Example(StrEnum):
    """Files for which `potluck config` prints an annotated example."""

    RUN = "run"
    OPERATOR = "operator"


@app.command("config")
def config(
    what: Annotated[Example, typer.Argument(help="Configuration file to print.")] = Example.RUN,
) -> None:
    """Print an annotated example of a configuration file.

    It has all keys with their defaults. The task of the run file, `digits`, needs no files; replace
    it with your own. `potluck-server config` and `potluck-client config` print examples for the
    coordinator and the hosts.

    ```console
    potluck config > run.toml
    potluck config operator > operator.toml
    ```
    """
    text = example_run_file() if what is Example.RUN else example_operator_config()
    typer.echo(text, nl=False)
