"""`potluck export` and `potluck evaluate`: results of a run, as tables."""

from __future__ import annotations

import math
import tempfile
from contextlib import aclosing
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from potluck.common.errors import ConfigurationError, NotFoundError, StorageError
from potluck.common.settings.extras import require
from potluck.common.tables.table_files import check_table_name, write_table
from potluck.deploy.commands.connection import AsJson, BestModel, RunOrNewest, operator_command
from potluck.deploy.operator.json_view import to_line
from potluck.deploy.operator.model_download import download_model
from potluck.deploy.operator.operator_client import OperatorClient
from potluck.deploy.operator.run_view import RunView, observe
from potluck.deploy.terminal import table_console
from potluck.federation.rounds import Round, round_of
from potluck.federation.session_plugins import SessionPlugins
from potluck.rpc.v1.operator_pb2 import RunStatus

if TYPE_CHECKING:
    from potluck.federation.model_report import ModelReport

# `potluck --help` imports this module. It shows what a missing library needs, but does not wait
# for the import of the library: commands import pandas and scikit-learn when they run.
require("pandas", "potluck[notebook]")


class What(StrEnum):
    """Tables of a run."""

    ROUNDS = "rounds"
    SELECTIONS = "selections"
    CLIENTS = "clients"


async def _export(
    client: OperatorClient,
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="File to write, .csv or .parquet.",
            show_default=False,
        ),
    ],
    run_id: RunOrNewest = None,
    what: Annotated[
        What,
        typer.Option(help="Table to write: rounds, selections (with reasons) or clients."),
    ] = What.ROUNDS,
) -> None:
    """Write a run's rounds, selections or clients as a table.

    Also works while the run is in progress.

    ```console
    potluck export -o rounds.csv
    potluck export 3f9a --what selections -o selections.parquet
    ```
    """
    from potluck.federation.frames import clients_frame, rounds_frame, selections_frame

    check_table_name(output)
    status = await _status(client, run_id)
    rounds = await _rounds(client, status)
    frames = {
        What.ROUNDS: rounds_frame,
        What.SELECTIONS: selections_frame,
        What.CLIENTS: clients_frame,
    }
    frame = frames[what](rounds)
    table = frame if what is What.SELECTIONS else frame.reset_index()
    rows: list[dict[str, object]] = table.to_dict("records")  # type: ignore[assignment]  # keys: columns
    try:
        write_table(output, [str(name) for name in table.columns], rows)
    except OSError as error:
        raise StorageError(f"can't write {output}: {error.strerror}", path=output) from None
    typer.echo(f"{output}: {len(frame)} rows of run {status.run_id} ({status.name})")


async def _evaluate(
    client: OperatorClient,
    run_id: RunOrNewest = None,
    round_number: Annotated[
        int, typer.Option("--round", min=0, help="Round of the model; 0 for the last round.")
    ] = 0,
    best: BestModel = False,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            metavar="FOLDER",
            help="Folder of the task's data, if its evaluation data are files.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate a run's model on this machine, class by class.

    The model is downloaded and evaluated on the evaluation data of its task, which has to be
    installed on this machine.

    ```console
    potluck evaluate
    potluck evaluate 3f9a --round 12 --data data --json
    potluck evaluate 3f9a --best
    ```
    """
    from potluck.federation.model_report import evaluated_model

    if data is not None and not data.is_dir():
        raise ConfigurationError(
            f"{data} is not a folder; name an existing folder with --data", path=data
        )
    status = await _status(client, run_id)
    with tempfile.TemporaryDirectory(prefix="potluck-model-") as folder:
        path = Path(folder) / "model.safetensors"
        found = await download_model(
            client, status.run_id, path, round_number=round_number, best=best
        )
        report = evaluated_model(path, found.run_file, SessionPlugins(), data)
    if as_json:
        named = {"run": status.run_id, "round": found.origin.round}
        typer.echo(to_line({**named, **report.values()}))
    else:
        title = f"run {status.run_id} ({status.name}), round {found.origin.round}"
        _show(report, title, found.run_file.task.name)


def _show(report: ModelReport, title: str, task: str) -> None:
    auroc = "" if report.auroc is None else f", AUROC {report.auroc:.3f}"
    typer.echo(f"{title}: accuracy {report.accuracy:.1%}{auroc} on {report.samples} of {task}")
    console = table_console()
    table = Table(title="by class", title_justify="left")
    for name in ("class", *report.classes.columns):
        table.add_column(str(name), justify="right")
    for number, row in report.classes.iterrows():
        *shares, samples = row.tolist()
        shown = ["–" if math.isnan(share) else f"{share:.3f}" for share in shares]
        table.add_row(str(number), *shown, f"{samples:.0f}")
    console.print(table)
    matrix = Table(title="true class by row, predicted class by column", title_justify="left")
    for name in ("", *report.confusion.columns):
        matrix.add_column(str(name), justify="right")
    for number, row in report.confusion.iterrows():
        matrix.add_row(str(number), *(str(count) for count in row.tolist()))
    console.print(matrix)


async def _status(client: OperatorClient, run_id: str | None) -> RunStatus:
    if run_id is not None:
        return await client.find_run(run_id)
    newest = await client.newest_run()
    if newest is None:
        raise NotFoundError("no run has been started yet; start one with `potluck run FILE`")
    return newest


async def _rounds(client: OperatorClient, status: RunStatus) -> list[Round]:
    """Return the rounds of a run that are committed so far, in order."""
    view = RunView()
    if status.committed_rounds:
        async with aclosing(client.watch_run(status.run_id)) as events:
            async for event in events:
                view = observe(view, event)
                if len(view.committed) >= status.committed_rounds:
                    break
    return [round_of(committed) for committed in view.rounds]


export = operator_command(_export)
evaluate = operator_command(_evaluate)
