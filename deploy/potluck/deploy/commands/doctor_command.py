"""`potluck doctor`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from potluck.client.config import load_config
from potluck.common.errors import PotluckError
from potluck.common.process.command_line import FAILED
from potluck.common.settings.configuration import load, parse_toml
from potluck.deploy.doctor import diagnosis, party_checks
from potluck.deploy.doctor.diagnosis import Finding, Verdict
from potluck.deploy.doctor.party_checks import admission
from potluck.deploy.operator.json_view import to_line
from potluck.deploy.operator.operator_client import connect
from potluck.deploy.operator.operator_config import (
    FILE_NAME,
    OperatorConfig,
    OperatorFlags,
    load_operator_config,
)
from potluck.deploy.terminal import terminal
from potluck.server.cli import ENVIRONMENT_PREFIX as SERVER_PREFIX
from potluck.server.config import CoordinatorConfig

_ANSWER_SECONDS = 15.0
_STYLES = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.ERROR: "red"}


def doctor(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FILE...",
            help="Configuration files of a coordinator or of hosts on this machine.",
            show_default=False,
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="Path of operator.toml. Default: as for other commands."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> int:
    """Check this machine and the federation, and name remedies.

    Checks software, certificates, clock, disk and ports. With the FILE of a host it also checks the
    host's device, its ledgers of trainings with noise, and that its coordinator accepts it. With an
    operator.toml it also checks that the coordinator answers, and its state.

    Each line starts with ok, warning or error; the remedy, if any, is on the next line. Exit
    status: 1 if there is an error, else 0.

    ```console
    potluck doctor
    potluck doctor coordinator.toml host-0.toml
    ```
    """
    findings = {"this machine": diagnosis.software()}
    for file in files or ():
        findings[str(file)] = _examined(file)
    findings["the federation"] = _federation(config)
    if as_json:
        typer.echo(to_line(_values(findings)))
    else:
        _print(findings)
    bad = any(each.verdict is Verdict.ERROR for found in findings.values() for each in found)
    return FAILED if bad else 0


def _examined(file: Path) -> list[Finding]:
    """Return the findings on a configuration file, a coordinator's or a host's.

    The file's keys show which of the two it is.
    """
    now = datetime.now(UTC)
    try:
        keys = set(parse_toml(file.read_text(), source=str(file)))
        if "listen" in keys or not keys & {"coordinator", "clients"}:
            config = load(CoordinatorConfig, file, environment_prefix=SERVER_PREFIX)
            files = diagnosis.coordinator_files(config, now)
            return [*files, *party_checks.coordinator_membership(config, now)]
        host = load_config(file, {})
        files = diagnosis.host_files(host, now)
        found = [
            *files,
            *party_checks.host_membership(host, now),
            *party_checks.private_trainings(host),
        ]
        usable = not any(
            each.about == "certificate" and each.verdict is Verdict.ERROR for each in found
        )
        return [*found, admission(host)] if usable else found
    except (OSError, ValueError, PotluckError) as error:
        why = str(error)
        if isinstance(error, OSError):
            why = f"{error.filename or file} can't be read: {error.strerror}"
        remedy = "`potluck-server config` and `potluck-client config` print examples"
        return [Finding("configuration", Verdict.ERROR, why, remedy)]


def _federation(path: Path | None) -> list[Finding]:
    try:
        config = load_operator_config(OperatorFlags(config=path))
    except PotluckError as error:
        if path is not None:
            remedy = "`potluck config operator` prints an example"
            return [Finding("operator", Verdict.ERROR, error.message, remedy)]
        found = error.message.partition("; write a file")[0]  # names options that doctor lacks
        remedy = (
            f"write a file (`potluck config operator > {FILE_NAME}`, then edit it), or name a file "
            "with --config"
        )
        return [Finding("operator", Verdict.WARNING, found, remedy)]
    mine = diagnosis.certificates(config.tls, datetime.now(UTC))
    if mine.verdict is Verdict.ERROR:
        return [mine]
    return [mine, *asyncio.run(_asked(config))]


async def _asked(config: OperatorConfig) -> list[Finding]:
    begun = time.monotonic()
    try:
        async with asyncio.timeout(_ANSWER_SECONDS), connect(config) as client:
            described = await client.describe_coordinator()
            seconds = time.monotonic() - begun
            clients = await client.list_clients()
    except TimeoutError:
        found = (
            f"the coordinator {config.coordinator} did not answer within {_ANSWER_SECONDS:.0f} s"
        )
        remedy = "check the address, and that no firewall drops packets to its port"
        return [Finding("coordinator", Verdict.ERROR, found, remedy)]
    except PotluckError as error:
        found, _, remedy = error.message.partition("; ")
        return [Finding("coordinator", Verdict.ERROR, found, remedy or "see the coordinator's log")]
    return list(diagnosis.federation(described, clients, seconds, datetime.now(UTC)))


def _values(findings: dict[str, list[Finding]]) -> dict[str, object]:
    return {
        place: [
            {"about": each.about, "verdict": each.verdict, "found": each.found}
            | ({"remedy": each.remedy} if each.remedy else {})
            for each in found
        ]
        for place, found in findings.items()
    }


def _print(findings: dict[str, Sequence[Finding]] | dict[str, list[Finding]]) -> None:
    console = terminal()
    for place, found in findings.items():
        console.print(Text(place, style="bold"))
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 2))
        table.add_column(no_wrap=True, min_width=len(Verdict.WARNING))
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for each in found:
            text = Text(each.found)
            if each.remedy:
                text.append(f"\n→ {each.remedy}", style="bold")
            table.add_row(Text(each.verdict, style=_STYLES[each.verdict]), each.about, text)
        console.print(table)
    verdicts = [each.verdict for found in findings.values() for each in found]
    console.print(
        ", ".join(f"{verdicts.count(each)} {each}" for each in Verdict if each in verdicts)
    )


app = typer.Typer()
app.command("doctor")(doctor)
