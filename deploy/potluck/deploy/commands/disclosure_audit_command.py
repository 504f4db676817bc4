"""`potluck audit`: data that a run's clients disclosed, as the coordinator saw it."""

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
from potluck.deploy.view.client_disclosures import (
    client_disclosures,
    holds_against,
    profile_values,
)
from potluck.rpc.v1 import operator_pb2

_SHOWN = 3


async def audit(client: OperatorClient, run_id: RunId, as_json: AsJson = False) -> None:
    """Show what the clients of a run disclosed.

    For each secure sum, it shows the number of clients and hosts, the policy, the privacy loss, the
    clients that refused it with their rules, and the parties that can't see single values. Masked
    updates have one sum per round. Updates without masks are not listed: each client that trained
    sent one. Clients keep their own records: `potluck-client disclosures`.

        potluck audit 3f9a
    """
    parts = await client.audit_disclosures(run_id)
    sums = [each for part in parts for each in part.sums]
    profiles = [each for part in parts for each in part.profiles]
    independent = any(part.independent_root for part in parts)
    if as_json:
        typer.echo(
            to_line(
                {
                    "sums": [sum_values(each) for each in sums],
                    "profiles": [profile_values(each) for each in profiles],
                    "sums_hold_against": holds_against(independent=independent),
                }
            )
        )
        return
    console = table_console()
    if sums:
        console.print(sums_table(sums))
        console.print(f"Sums hide single clients from {holds_against(independent=independent)}.")
    else:
        console.print("No secure sum includes clients of this run.")
    console.print(clients_table(sums, profiles))


def sum_values(each: operator_pb2.AuditedSum) -> dict[str, Any]:
    """Return a secure sum as plain values."""
    values: dict[str, Any] = {
        "session": each.session_id,
        "run": each.run_id,
        "disclosure": each.disclosure,
        "subject": each.subject,
        "released": each.released,
        "clients": dict(sorted(each.hosts.items())),
        "hosts": len(set(each.hosts.values())),
        "least_hosts": each.least_hosts,
        "colluding_hosts": each.colluding_hosts,
        "quorum": each.quorum,
        "epsilon": each.epsilon or None,
        "refusals": dict(sorted(each.refusals.items())),
        "round": each.round or None,
        "attempt": each.attempt,
        "at": each.at,
    }
    if not each.released:
        values |= {"stage": each.stage, "rule": each.rule, "have": each.have, "need": each.need}
        values |= {"convicted": dict(each.convicted), "verdict": each.verdict.hex()}
    return values


def sums_table(sums: Sequence[operator_pb2.AuditedSum]) -> Table:
    """Return a table with one row per session, oldest first."""
    table = _table("session", "run", "policy", "of", "clients", "hosts", "ε", "outcome")
    for each in sums:
        table.add_row(
            each.session_id[:8],
            each.run_id,
            Text(f"{each.disclosure}, ≥ {each.least_hosts} hosts"),
            Text(each.subject + f", round {each.round}" * (each.round > 0)),
            str(len(each.hosts)),
            str(len(set(each.hosts.values()))),
            f"{each.epsilon:g}" if each.epsilon else "exact",
            Text(_outcome(each), style="green" if each.released else "yellow"),
        )
    return table


def clients_table(
    sums: Sequence[operator_pb2.AuditedSum], profiles: Sequence[operator_pb2.AuditedProfile]
) -> Table:
    """Return a table with one row per client: its secure sums, and its other disclosures."""
    table = _table("client", "sums", "least hosts in one", "disclosed itself", "ε in all")
    for each in client_disclosures(sums, profiles):
        table.add_row(
            Text(each.client),
            str(each.sums),
            str(each.least_hosts or ""),
            ", ".join(each.signals) or "nothing",
            f"{each.epsilon:g}",
        )
    return table


def _outcome(each: operator_pb2.AuditedSum) -> str:
    rules = [f"{client}: {rule}" for client, rule in sorted(each.refusals.items())]
    told = ", ".join(rules[:_SHOWN]) + f" and {len(rules) - _SHOWN} more" * (len(rules) > _SHOWN)
    refused = f"; refused by {told}" if rules else ""
    if each.released:
        return f"released{refused}"
    if each.convicted:
        [[accused, accuser]] = each.convicted.items()
        return (
            f"aborted: client {accuser} proved that client {accused} sent a share that can't "
            f"be decrypted{refused}"
        )
    return (
        f"aborted at stage {each.stage}: rule {each.rule} needs {each.need} clients or hosts, "
        f"but found {each.have}{refused}"
    )


def _table(*names: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name in names:
        right = name in ("clients", "hosts", "sums", "least hosts in one", "ε in all")
        table.add_column(name, justify="right" if right else "left")
    return table


app = typer.Typer()
app.command("audit")(operator_command(audit))
