"""`potluck run`: starts a run."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Annotated, TextIO

import typer

from potluck.common.errors import ConfigurationError
from potluck.common.run_file.claims import privacy_claim
from potluck.common.run_file.runfile import parse_run_file
from potluck.common.settings.configuration import decode
from potluck.deploy.commands.connection import AsJson, Assignments, operator_command
from potluck.deploy.commands.existing_run_commands import follow_run
from potluck.deploy.operator.json_view import to_line
from potluck.deploy.operator.operator_client import OperatorClient
from potluck.deploy.operator.run_overrides import override


async def run(
    client: OperatorClient,
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE]", help="Run file; - reads standard input.", show_default=False
        ),
    ] = None,
    again: Annotated[
        str | None,
        typer.Option(
            "--again",
            metavar="RUN",
            help="Use the run file of this earlier run.",
            show_default=False,
        ),
    ] = None,
    assignments: Assignments = None,
    watch: Annotated[bool, typer.Option("--watch", help="Follow the run until it ends.")] = False,
    as_json: AsJson = False,
) -> None:
    """Start a run from a run file, and print its id.

    The file's keys and values are checked here, before the coordinator's address is needed. The
    coordinator checks plug-ins and their options, and refuses combinations that don't work. Without
    --watch the run continues by itself; `potluck watch` shows it.

    ```console
    potluck config > run.toml
    potluck run run.toml -o rounds=5 --watch
    potluck run --again 3f9a -o seed=8
    ```
    """
    text, source = await _run_file(client, file, again)
    text = override(text, assignments or [], source=source)
    checked = parse_run_file(text, source=source)
    run_id = await client.start_run(text)
    claim = privacy_claim(checked.model_dump(exclude_none=True))
    if claim and not watch:  # with --watch, it is shown as a notice
        typer.echo(claim, err=True)
    typer.echo(to_line({"run": run_id}) if as_json else run_id)
    if watch:
        await follow_run(client, run_id, as_json=as_json)


def _check_file(
    file: Path | None = None,
    again: str | None = None,
    assignments: list[str] | None = None,
    **_: object,
) -> None:
    """Check the run file before the coordinator's address is needed. Raises ConfigurationError."""
    if file is not None and again is not None:
        raise ConfigurationError(
            f"both the run file {file} and --again {again} are given; give only one, and change "
            "values with -o"
        )
    if file is None and again is None:
        raise ConfigurationError(
            "no run file given; name a run file, or an earlier run with --again. `potluck config "
            "> run.toml` creates a run file"
        )
    if file is not None:
        text, source = read_run_file(file)
        parse_run_file(override(text, assignments or [], source=source), source=source)


async def _run_file(
    client: OperatorClient, file: Path | None, again: str | None
) -> tuple[str, str]:
    """Return the text of the run file to start, and the name that errors use for it."""
    if file is not None:
        return read_run_file(file)
    assert again is not None  # noqa: S101  # as checked before
    return await client.fetch_run_file(again), f"run file of {again}"


def read_run_file(file: Path) -> tuple[str, str]:
    """Return the text of a run file, and the name that errors use for it. `-` is standard input.

    Raises ConfigurationError if the file can't be read.
    """
    source = "standard input" if str(file) == "-" else str(file)
    try:
        data = _all_of(sys.stdin) if str(file) == "-" else file.read_bytes()
    except OSError as error:
        raise ConfigurationError(
            f"can't read the run file {file}: {error.strerror}; create one with `potluck config > "
            "run.toml`",
            path=file,
        ) from None
    return decode(data, source=source), source


@functools.lru_cache(maxsize=1)
def _all_of(stream: TextIO) -> bytes:
    """Return the whole input of a stream; cached, since a stream can be read only once."""
    return stream.buffer.read()


app = typer.Typer()
app.command("run")(operator_command(run, first=_check_file))
