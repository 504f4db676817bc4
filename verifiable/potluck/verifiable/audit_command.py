"""`potluck audit-selection`: repeats the selections of a run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:  # imports torch, which takes seconds
    from potluck.verifiable.coordinator.selection_audit import AuditedSelection

app = typer.Typer(rich_markup_mode="markdown")


@app.command("audit-selection")
def audit_selection(
    run: Annotated[
        str, typer.Argument(help="The run's id, a unique beginning of it, or its name.")
    ],
    config: Annotated[
        Path, typer.Option(help="The coordinator's configuration file (TOML).")
    ] = Path("coordinator.toml"),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per line.")
    ] = False,
) -> None:
    """Repeat the selections of a run and compare them.

    For runs with `verifiable = true` in `[selection]` of the run file. Runs on the coordinator's
    machine, also while the coordinator runs, or on a restored backup; it changes nothing.

    For each attempt at a round it checks the hash chain, the members' signatures, the committed
    inputs and the seed. It compares the selector's state with the recorded state after the round
    before, and profiles with those that the clients disclosed. It then calls the selector again
    with these inputs, and compares cohort and reasons with those of the round. It takes clients'
    answers as recorded. The exit code is 1 if anything differs.

    Each line ends with the digest of the attempt's last document. Hosts that received this document
    print the same digest with `potluck-client selections`.

        potluck audit-selection 3f9a --config coordinator.toml
    """
    from potluck.common.settings.configuration import load
    from potluck.server.config import CoordinatorConfig
    from potluck.verifiable.coordinator.selection_audit import SelectionAudit

    settings = load(CoordinatorConfig, config, environment_prefix="POTLUCK_SERVER")
    audit = SelectionAudit(settings, run)
    different = found = 0
    for each in _with_progress(audit.results(), len(audit)):
        found += 1
        different += not each.agrees
        typer.echo(_json(each) if as_json else _line(each))
    if not as_json:
        typer.echo(
            f"run {audit.run.run_id} has {found} selections, of which {different} differ "
            "from the record"
        )
    if different:
        raise typer.Exit(1)


def _with_progress(results: Iterable[AuditedSelection], count: int) -> Iterator[AuditedSelection]:
    """Yield the results; show progress on standard error if it is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("selections", total=count)
        for each in results:
            yield each
            progress.advance(task)


def _json(each: AuditedSelection) -> str:
    return json.dumps(asdict(each) | {"agrees": each.agrees})


def _line(each: AuditedSelection) -> str:
    state = "" if each.committed else ", not committed"
    cohort = f"{each.cohort} clients" if each.cohort else "no cohort"
    what = f"round {each.round}, attempt {each.attempt}{state}: {cohort}"
    missed = f", {each.missed} hosts did not reveal their shares" if each.missed else ""
    signed = f", {each.signatures} of {each.due} signatures" if each.due else ""
    last = "".join(f"; {kind} {sha256}" for kind, sha256 in [*each.documents.items()][-1:])
    if each.agrees:
        return f"{what}{signed}{missed}: agrees with the record{last}"
    return f"{what}{signed}{missed}: differs from the record: {'; '.join(each.differences)}{last}"
