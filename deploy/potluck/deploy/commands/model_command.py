"""`potluck model`: downloads a model, with its cards."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from potluck.deploy.cards.card_source import card_of_run
from potluck.deploy.cards.model_card import write_card
from potluck.deploy.commands.connection import (
    AsJson,
    BestModel,
    RunOrNewest,
    newest_run,
    operator_command,
)
from potluck.deploy.operator.json_view import best_values, to_line
from potluck.deploy.operator.model_download import download_model, shard_bytes, split, whole_file
from potluck.deploy.operator.operator_client import OperatorClient
from potluck.deploy.operator.run_view import best_coverage
from potluck.deploy.terminal import terminal
from potluck.deploy.view.readable import readable_bytes, readable_coverage


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
        typer.echo(to_line({**values, **named, **({"cards": cards} if card else {})}))
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
        typer.echo(f"{output}: {whose}, {size}, BLAKE3 digest {downloaded.blake3}{lacks}")
        for path in cards:
            typer.echo(path)


app = typer.Typer()
app.command("model")(operator_command(model))
