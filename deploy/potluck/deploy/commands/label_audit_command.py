"""`potluck audit-labels`: compares the label counts that clients report with their updates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer
from rich.table import Table
from rich.text import Text

from potluck.deploy.commands.connection import AsJson, RunId, operator_command
from potluck.deploy.operator.json_view import to_line
from potluck.deploy.operator.operator_client import OperatorClient
from potluck.deploy.terminal import table_console
from potluck.deploy.view.readable import natural_order
from potluck.rpc.v1 import operator_pb2
from potluck.rpc.v1.operator_pb2 import LabelVerdict

_COLOURS = {
    LabelVerdict.LABEL_VERDICT_SUSPICIOUS: "red",
    LabelVerdict.LABEL_VERDICT_CONSISTENT: "green",
}


async def audit_labels(client: OperatorClient, run_id: RunId, as_json: AsJson = False) -> None:
    """Compare claimed label counts with the clients' updates.

    According to its updates, a suspicious client has more or fewer samples of a class than it
    claims. About one honest client in a hundred is suspicious as well: check again before `potluck
    clients quarantine`. Works during and after a run whose selector needs label counts. --json
    prints an object per client.

        potluck audit-labels 3f9a
    """
    audits = await client.audit_labels(run_id)
    if as_json:
        for audit in audits:
            typer.echo(to_line(audit_values(audit)))
    else:
        table_console().print(audit_table(audits))


def audit_values(audit: operator_pb2.LabelAudit) -> dict[str, Any]:
    """Return a client's audit as plain values."""
    return {
        "client": audit.client_id,
        "verdict": _verdict(audit),
        "rounds": audit.rounds,
        "suspicions": [
            {
                "class": each.label,
                "claimed": each.claimed,
                "at_least" if each.hidden else "at_most": each.bound,
                "rises": each.rises,
                "probability": each.probability,
            }
            for each in audit.suspicions
        ],
    }


def audit_table(audits: Sequence[operator_pb2.LabelAudit]) -> Table:
    """Return a table with one row per client, suspicious ones first.

    The reason in a row is about the class whose claimed count is the least probable.
    """
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("client", "verdict", "rounds", "why"):
        table.add_column(name, justify="right" if name == "rounds" else "left")
    suspicious = LabelVerdict.LABEL_VERDICT_SUSPICIOUS
    in_order = sorted(audits, key=lambda audit: natural_order(audit.client_id))
    for audit in sorted(in_order, key=lambda audit: audit.verdict != suspicious):
        table.add_row(
            Text(audit.client_id),
            Text(_verdict(audit), style=_COLOURS.get(audit.verdict, "yellow")),
            str(audit.rounds),
            Text(_why(audit)),
        )
    return table


def _verdict(audit: operator_pb2.LabelAudit) -> str:
    return LabelVerdict.Name(audit.verdict).removeprefix("LABEL_VERDICT_").lower()


def _why(audit: operator_pb2.LabelAudit) -> str:
    if not audit.suspicions:
        return "" if audit.rounds else "no label counts, or no update of this client"
    first, others = audit.suspicions[0], len(audit.suspicions) - 1
    seen = (
        f"estimate is at least {first.bound}: the bias rose in {first.rises} of {audit.rounds} "
        "rounds"
        if first.hidden
        else f"estimate is at most {first.bound}: the bias never rose in {audit.rounds} rounds"
    )
    more = f"; {others} more classes" if others > 1 else "; 1 more class" if others else ""
    claimed = f"{first.claimed:g}"
    return (
        f"class {first.label}: claimed count {claimed}, {seen} (p = {first.probability:.1g}){more}"
    )


app = typer.Typer()
app.command("audit-labels")(operator_command(audit_labels))
