"""`potluck pki`: make the federation's TLS authority and the certificates of its parties."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from potluck.common.errors import ConfigurationError
from potluck.common.net.identity import Role
from potluck.deploy.commands import member_commands, pki_lifecycle_commands
from potluck.deploy.pki import authority as pki
from potluck.deploy.pki.certificates import CertificateSummary, inspect
from potluck.deploy.terminal import print_line, print_next, terminal

app = typer.Typer(
    name="pki",
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="""Make and renew the certificates of a federation.

A federation has one authority, in a folder of the operator. Each party needs a certificate from it
to connect: the coordinator (with the addresses that hosts dial), every host (with its clients),
every relay (with both), and every operator.

    potluck pki init pki --federation demo

    potluck pki issue pki coordinator --host localhost --host 127.0.0.1

    potluck pki issue pki host lab-a --clients client-0:5

    potluck pki issue pki relay gate --clients client-0:5 --host gate.example

    potluck pki issue pki operator ada

Later: `list` shows the issued certificates, `renew` issues them again before they expire, `revoke`
and `push` disconnect a party. A host can make its own key with `potluck-client enroll`, so that the
key never leaves its machine; `sign` certifies it.

Members of secure sums are listed separately, signed with another key: `root` makes the key;
`member`, `renew-members`, `rotate` and `revoke-member` write the next epoch of members.json;
`publish` sends it.

Give each party its own NAME.pem and NAME.key and a copy of authority.pem. Keep authority.key in
the folder: anyone who has it can issue certificates.""",
)

Folder = Annotated[Path, typer.Argument(help="The authority's folder.", show_default=False)]
Force = Annotated[bool, typer.Option("--force", help="Replace files that exist.")]


@app.command()
def init(
    folder: Annotated[
        Path, typer.Argument(help="Folder for the authority's files.", show_default=False)
    ],
    federation: Annotated[
        str, typer.Option(help="The federation's name: lower-case letters, digits, '.', '_', '-'.")
    ],
    days: Annotated[int, typer.Option(help="Days it is valid.")] = pki.AUTHORITY_DAYS,
    force: Force = False,
) -> None:
    """Make a federation's TLS authority: FOLDER/authority.pem and FOLDER/authority.key.

    --force replaces an existing authority; every certificate that it has issued stops working.
    """
    files = pki.create_authority(folder, federation, days=days, force=force)
    console = terminal()
    _print_written(console, files)
    print_next(
        console,
        f"potluck pki issue {folder} coordinator --host localhost --host 127.0.0.1",
        f"potluck pki issue {folder} host NAME --clients client-0:5",
        f"potluck pki issue {folder} operator NAME",
    )


@app.command()
def issue(
    folder: Folder,
    role: Annotated[Role, typer.Argument(help="Role of the party.", show_default=False)],
    name: Annotated[
        str | None,
        typer.Argument(help="The party's name; optional for a coordinator.", show_default=False),
    ] = None,
    clients: Annotated[
        list[str] | None,
        typer.Option(
            help="A client of the host or relay, or a range: hospital-a, client-0:23, silo-00:09. "
            "Repeat the option, or separate by commas.",
            show_default=False,
        ),
    ] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(
            help="A host name or IP address at which hosts dial the coordinator or relay; "
            "repeatable.",
            show_default=False,
        ),
    ] = None,
    days: Annotated[int, typer.Option(help="Days it is valid.")] = pki.LEAF_DAYS,
    force: Force = False,
) -> None:
    """Issue a certificate: FOLDER/NAME.pem and FOLDER/NAME.key.

    potluck pki issue pki coordinator --host localhost --host 127.0.0.1

    potluck pki issue pki host lab-a --clients client-0:5 --clients hospital-a

    potluck pki issue pki relay gate --clients client-0:5 --host gate.example

    potluck pki issue pki operator ada
    """
    if name is None and role is not Role.COORDINATOR:
        raise ConfigurationError(
            f"a {role} needs a name; write `potluck pki issue {folder} {role} NAME`"
        )
    files = pki.issue(
        folder,
        role,
        name or Role.COORDINATOR.value,
        clients=clients or (),
        hosts=host or (),
        days=days,
        force=force,
    )
    console = terminal()
    _print_written(console, files)
    _print_party_next(console, role, files)


@app.command()
def show(
    file: Annotated[Path, typer.Argument(help="A certificate, NAME.pem.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Show a certificate's party, its clients or addresses, and the end of its validity."""
    fields = _fields(inspect(file))
    if as_json:
        typer.echo(json.dumps(fields))
        return
    table = Table(show_header=False, box=None)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for key, value in fields.items():
        text = ", ".join(value) if isinstance(value, list) else value
        if text:
            table.add_row(key.replace("_", " "), Text(text))
    terminal().print(table)


member_commands.add_to(app)
pki_lifecycle_commands.add_to(app)


def _fields(summary: CertificateSummary) -> dict[str, Any]:
    identity = summary.identity
    return {
        "federation": summary.federation,
        "role": "authority" if identity is None else identity.role.value,
        "name": None if identity is None else identity.name,
        "clients": [] if identity is None else [str(claim) for claim in identity.claims],
        "hosts": list(summary.hosts),
        "valid_from": summary.not_before.isoformat(),
        "valid_until": summary.not_after.isoformat(),
        "serial": summary.serial,
        "sha256": summary.sha256,
    }


def _print_written(console: Console, files: pki.IssuedFiles) -> None:
    summary = inspect(files.certificate)
    who = (
        f"TLS authority of federation {summary.federation}"
        if summary.identity is None
        else f"{summary.identity.role} {summary.identity.name} of federation {summary.federation}"
    )
    console.print(Text(f"{who}, valid until {summary.not_after:%Y-%m-%d}", style="bold green"))
    print_line(console, f"  certificate  {files.certificate}")
    print_line(console, f"  key          {files.key}  (secret; mode 0600)")


def _print_party_next(console: Console, role: Role, files: pki.IssuedFiles) -> None:
    command = {
        Role.COORDINATOR: "potluck-server --config FILE",
        Role.HOST: "potluck-client --config FILE",
        Role.RELAY: "potluck-relay check --config FILE",
        Role.OPERATOR: "potluck clients",
    }[role]
    print_line(console, f"Give the {role} both files and {files.authority}. Its [tls] table:")
    print_line(console, f"  certificate = {json.dumps(str(files.certificate))}")
    print_line(console, f"  key = {json.dumps(str(files.key))}")
    print_line(console, f"  authority = {json.dumps(str(files.authority))}")
    print_next(console, command)
