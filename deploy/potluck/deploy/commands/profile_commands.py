"""`potluck profiles`: the disclosed profiles of a run's clients, as a file for `potluck select`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from potluck.common.errors import StorageError
from potluck.deploy.commands.connection import RunOrNewest, newest_run, operator_command
from potluck.deploy.operator.operator_client import OperatorClient
from potluck.rpc.v1 import operator_pb2


async def profiles(
    client: OperatorClient,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FILE", help="File to write.", show_default=False),
    ],
    run_id: RunOrNewest = None,
) -> None:
    """Write what a run's clients have disclosed to a JSON file.

    `potluck select --profiles FILE` reads it, to show which clients another selector would choose.
    Noisy counts below zero are written as 0, as selectors read them. `samples` comes from updates;
    it is 0 for a client that was never included.

        potluck profiles 3f9a -o profiles.json
    """
    classes, clients = await client.fetch_profiles(run_id or await newest_run(client))
    text = profiles_text(classes, clients)
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"can't write {output}: {error.strerror}", path=output) from None
    typer.echo(f"{output}: profiles of {len(clients)} clients")


def profiles_text(classes: int, clients: Sequence[operator_pb2.ClientProfile]) -> str:
    """Return the text of a profile file, with one client per line; see `offline_selection`."""
    lines = ",\n  ".join(json.dumps(_values(client)) for client in clients)
    return f'{{"classes": {classes}, "clients": [\n  {lines}\n]}}\n'


def _values(client: operator_pb2.ClientProfile) -> dict[str, Any]:
    values: dict[str, Any] = {"id": client.client_id}
    if client.samples:
        values["samples"] = client.samples
    if client.label_counts:
        values["label_counts"] = [_count(entry) for entry in client.label_counts]
    if client.triplet:
        values["triplet"] = list(client.triplet)
    if client.interaction_matrix:
        entries = [_count(entry) for entry in client.interaction_matrix]
        values["interaction_matrix"] = [
            entries[index : index + 2] for index in range(0, len(entries), 2)
        ]
    return values


def _count(entry: float) -> float | int:
    clipped = max(0.0, entry)
    return int(clipped) if clipped.is_integer() else clipped


app = typer.Typer()
app.command("profiles")(operator_command(profiles))
