"""`potluck run`, `runs`, `watch`, `stop`, `resume`, `delete` and `model`."""

from __future__ import annotations

import asyncio
import functools
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, TextIO

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from potluck.common.errors import ConfigurationError, NotFoundError, RunError
from potluck.common.process.command_line import FAILED
from potluck.common.run_file.claims import privacy_claim
from potluck.common.run_file.runfile import parse_run_file
from potluck.common.settings.configuration import decode
from potluck.deploy.cards.card_source import card_of_run
from potluck.deploy.cards.model_card import write_card
from potluck.deploy.commands.connection import operator_command
from potluck.deploy.operator.json_view import best_values, status_values, to_line
from potluck.deploy.operator.model_download import (
    download_model,
    shard_bytes,
    split,
    whole_file,
)
from potluck.deploy.operator.operator_client import OperatorClient
from potluck.deploy.operator.run_overrides import override
from potluck.deploy.operator.run_view import ENDED, best_coverage, run_state_name
from potluck.deploy.terminal import terminal
from potluck.deploy.view.listings import run_table, runs_table
from potluck.deploy.view.readable import readable_bytes, readable_coverage
from potluck.deploy.view.watch import display_for, follow, is_finished
from potluck.deploy.view.watch_lines import status_line

_SHOWN_ROUNDS = 100
"""Default number of earlier rounds shown to a person; with --json, a program gets all rounds."""

RunId = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="The run's id, a unique beginning of it, or a name that no other run has.",
        show_default=False,
    ),
]
RunOrNewest = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN",
        help="The run's id, a unique beginning of it, or a name that no other run has. Default: "
        "the newest run.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
BestModel = Annotated[
    bool,
    typer.Option(
        "--best",
        help="Use the best model, by stop.measure or retention.keep_best.",
    ),
]
Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "-o",
        metavar="KEY=VALUE",
        help="Replace a value of the run file, for example -o rounds=5 -o training.epochs=2.",
        show_default=False,
    ),
]


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
    print_line(to_line({"run": run_id}) if as_json else run_id)
    if watch:
        await _watch(client, run_id, as_json=as_json)


async def watch(
    client: OperatorClient,
    run_id: RunOrNewest = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            "--rounds",
            min=0,
            help="Number of past rounds to show; 0 for all, as with --json. [default: 100]",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a run's rounds and their clients until it ends.

    Without a terminal every event is a plain line; with --json an object per line. If the
    coordinator stops, the command waits for it. The exit code is 0 if the run finishes, 1 if it
    fails or is stopped. Ctrl-C ends the watching, not the run.

    ```console
    potluck watch
    potluck watch 3f9a --json
    ```
    """
    run_id = run_id or await newest_run(client)
    await _watch(client, run_id, as_json=as_json, rounds=rounds)


async def runs(
    client: OperatorClient,
    run_id: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            help="Show only this run, with all known facts.",
            show_default=False,
        ),
    ] = None,
    file: Annotated[
        bool, typer.Option("--file", help="Print the run file with which the run was started.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List all runs, newest first, or show one.

    Other commands take a run's id from here, a unique beginning of it, or a name that no other
    run has.

    ```console
    potluck runs
    potluck runs 3f9a
    potluck runs 3f9a --file > run.toml
    ```
    """
    if file:
        text = await client.fetch_run_file(run_id or await newest_run(client))
        print_line(to_line({"run_file": text}) if as_json else text.rstrip("\n"))
        return
    found = await client.list_runs() if run_id is None else [await client.find_run(run_id)]
    lost = await client.lost_runs() if run_id is None else []
    if as_json:
        values: dict[str, object] = {"runs": [status_values(status) for status in found]}
        print_line(to_line(values | ({"lost": lost} if lost else {})))
    elif run_id is not None:
        table_console().print(run_table(found[0], datetime.now(UTC)))
    elif found:
        console = table_console()
        console.print(runs_table(found, datetime.now(UTC), width=console.width))
    elif not lost:
        print_line("no runs yet; start one with `potluck run FILE`")
    for reason in () if as_json else lost:
        print_line(reason)


async def stop(client: OperatorClient, run_id: RunId, as_json: AsJson = False) -> None:
    """Stop a run, and keep its last committed model.

    Its current round is abandoned. Prints the run's state after that.

    ```console
    potluck stop 3f9a
    ```
    """
    status = await client.stop_run(run_id)
    print_line(to_line(status_values(status)) if as_json else status_line(status))


async def delete(
    client: OperatorClient,
    run_id: RunId,
    yes: Annotated[
        bool, typer.Option("--yes", help="Delete without asking for confirmation.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Delete the rounds and models of a run that is over.

    Models that other runs also have are not deleted. Nor is the record of what its clients
    disclosed, because it accounts for their privacy. The command asks first; without a terminal,
    it needs --yes.

    ```console
    potluck delete 3f9a
    ```
    """
    status = await client.find_run(run_id)
    if status.state not in ENDED:
        state = run_state_name(status.state)
        raise RunError(
            f"run {status.run_id} is {state}; stop it first: `potluck stop {status.run_id}`"
        )
    if not yes:
        if not sys.stdin.isatty():
            raise ConfigurationError(
                f"{status_line(status)}; add --yes to delete the run, since the command can't ask "
                "without a terminal"
            )
        typer.confirm(f"{status_line(status)}; delete it?", abort=True)
    status = await client.delete_run(status.run_id)
    deleted = f"deleted run {status.run_id} ({status.name})"
    print_line(to_line(status_values(status)) if as_json else deleted)


async def resume(
    client: OperatorClient,
    run_id: RunOrNewest = None,
    watch: Annotated[bool, typer.Option("--watch", help="Follow the run until it ends.")] = False,
    as_json: AsJson = False,
) -> None:
    """Continue a run that was stopped or has failed.

    The run continues after its last committed round. A run that a crash or a restart of the
    coordinator interrupted continues by itself.

    ```console
    potluck resume
    potluck resume 3f9a --watch
    ```
    """
    run_id = run_id or await newest_run(client)
    status = await client.resume_run(run_id)
    print_line(to_line(status_values(status)) if as_json else status_line(status))
    if watch:
        await _watch(client, status.run_id, as_json=as_json)


async def model(
    client: OperatorClient,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FILE", help="File to write.", show_default=False),
    ],
    run_id: RunOrNewest = None,
    round_number: Annotated[
        int, typer.Option("--round", min=0, help="Round of the model; 0 for the last.")
    ] = 0,
    best: BestModel = False,
    exact: Annotated[
        bool,
        typer.Option("--exact", help="Write the coordinator's exact bytes, without metadata."),
    ] = False,
    shards: Annotated[
        str | None,
        typer.Option(
            "--shards",
            metavar="SIZE",
            help="Write shards of at most this size, such as 5GB, with an index; FILE is then a "
            "folder.",
            show_default=False,
        ),
    ] = None,
    card: Annotated[
        bool,
        typer.Option(
            "--card",
            help="Also write the model card (.card.json and .card.md).",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Download a run's model as float32 safetensors.

    The download is verified by its BLAKE3 digest. The file's metadata name the run, the round, the
    task and its options, so that its origin is known; the digest is that of the file without them
    (`--exact`). A broken download continues where it stopped when the command is given again.
    Shards are as Hugging Face's libraries write them; while they are made the disk holds the model
    twice.

    ```console
    potluck model -o model.safetensors
    potluck model 3f9a --round 12 -o round-12.safetensors
    potluck model 3f9a --best --card -o best.safetensors
    potluck model 3f9a --shards 5GB -o folder
    ```
    """
    most = None if shards is None else shard_bytes(shards)
    run_id = run_id or await newest_run(client)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    console = terminal(stderr=True)
    with Progress(
        *columns, TransferSpeedColumn(), console=console, transient=True,
        disable=not console.is_terminal,
    ) as bar:  # fmt: skip
        task = bar.add_task("model", total=None)
        downloaded = await download_model(
            client,
            run_id,
            output if most is None else whole_file(output),
            round_number=round_number,
            best=best,
            progress=lambda here, total: bar.update(task, completed=here, total=total),
            describe=not exact and most is None,
        )
    origin, kept = downloaded.origin, downloaded.kept_patterns
    if most is not None:
        metadata = {} if exact else downloaded.metadata()
        downloaded = await split(downloaded, metadata, most)
    cards: list[str] = []
    if card:
        # The card is of the downloaded round: an active run may have newer rounds by now.
        described = await card_of_run(
            client, origin.run_id, round_number=origin.round, best_of=origin.best.measure or None
        )
        cards = [str(path) for path in write_card(described, output)]
    if as_json:
        values = {"path": str(output), "blake3": downloaded.blake3, "size": downloaded.size}
        values |= {"run": origin.run_id, "round": origin.round}
        named = {"best": best_values(origin.best)} if best else {}
        print_line(to_line({**values, **named, **({"cards": cards} if card else {})}))
    else:
        whose = f"round {origin.round} of run {origin.run_id} ({origin.name})"
        if best:
            behind = best_coverage(origin.best)
            over = "" if behind is None else f" over {readable_coverage(behind)}"
            whose += f", its best {origin.best.measure} ({origin.best.value:.6g}{over})"
        size = readable_bytes(downloaded.size)
        lacks = (
            f"; the file does not contain the tensors that clients keep: {', '.join(kept)}"
            if kept
            else ""
        )
        print_line(f"{output}: {whose}, {size}, BLAKE3 digest {downloaded.blake3}{lacks}")
        for path in cards:
            print_line(path)


def print_line(line: str) -> None:
    """Print one line on standard output, without wrapping it at the terminal's width."""
    typer.echo(line)


async def newest_run(client: OperatorClient) -> str:
    """Return the id of the run that was started last. Raises NotFoundError if there is none."""
    newest = await client.newest_run()
    if newest is None:
        raise NotFoundError("no run has been started yet; start one with `potluck run FILE`")
    return newest.run_id


async def _watch(
    client: OperatorClient, run_id: str, *, as_json: bool, rounds: int | None = None
) -> None:
    if rounds is None:
        rounds = 0 if as_json else _SHOWN_ROUNDS
    try:
        with display_for(terminal(), as_json=as_json) as display:
            view = await follow(client, run_id, display, newest_rounds=rounds)
    except asyncio.CancelledError:  # by Ctrl-C
        hint = f"(`potluck watch {run_id}`, `potluck stop {run_id}`)"
        typer.echo(f"stopped watching; run {run_id} continues {hint}", err=True)
        raise
    if not is_finished(view):
        raise typer.Exit(FAILED)  # the display has shown the reason


def table_console() -> Console:
    """Return a console for tables that also suits piped output."""
    console = terminal()
    # rich assumes that a pipe has 80 columns, and would cut the table there.
    return console if console.is_terminal else terminal(width=240)


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
app.command("watch")(operator_command(watch))
app.command("runs")(operator_command(runs))
app.command("stop")(operator_command(stop))
app.command("resume")(operator_command(resume))
app.command("delete")(operator_command(delete))
app.command("model")(operator_command(model))
