"""`potluck pki`: make and manage the federation's TLS authority and its parties' certificates."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from potluck.common.errors import ConfigurationError
from potluck.common.net.identity import Role
from potluck.common.net.key_files import key_fingerprint
from potluck.deploy.commands import member_commands
from potluck.deploy.commands.connection import operator_command
from potluck.deploy.operator.operator_client import OperatorClient
from potluck.deploy.pki import authority as pki
from potluck.deploy.pki import certificate_register as register
from potluck.deploy.pki.certificates import CertificateSummary, inspect
from potluck.deploy.terminal import print_line, print_next, terminal

# Issued certificates ------------------------------------------------------------------------------

Folder = Annotated[Path, typer.Argument(help="Folder of the TLS authority.", show_default=False)]
Days = Annotated[int, typer.Option(help="Number of days that the certificate is valid.")]

_SERIAL_SHOWN = 12
"""Digits of a serial number in the table; a complete one has 40, half of a terminal's width."""
_STYLES = {"revoked": "red", "expired": "red", "expires soon": "yellow", "valid": "green"}


def list_issued(
    folder: Folder,
    everything: Annotated[
        bool, typer.Option("--all", help="Also list expired and replaced certificates.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """List the certificates that an authority has issued, with their states.

    Without --all, lists the newest certificate of each party, and all revoked certificates. The
    table has the beginning of each serial number, which `revoke` accepts; --json has the complete
    numbers.
    """
    now = datetime.now(UTC)
    issued = register.issued(folder)
    if not everything:
        newest = {one.identity.name: one.summary.serial for one in issued}
        current = set(newest.values())
        issued = [one for one in issued if one.summary.serial in current or one.revoked is not None]
    if as_json:
        typer.echo(json.dumps([_issued_fields(one, now) for one in issued]))
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("name", no_wrap=True)
    table.add_column("role", no_wrap=True)
    table.add_column("clients or addresses", overflow="fold")
    for column in ("serial", "until", "state"):
        table.add_column(column, no_wrap=True)
    for one in issued:
        what = one.summary.hosts or tuple(str(claim) for claim in one.identity.claims)
        state = one.state(now)
        table.add_row(
            one.identity.name,
            one.identity.role.value,
            ", ".join(what),
            one.summary.serial[:_SERIAL_SHOWN],
            f"{one.summary.not_after:%Y-%m-%d}",
            Text(state, style=_STYLES.get(state, "")),
        )
    terminal().print(table)


def _issued_fields(one: register.Issued, now: datetime) -> dict[str, object]:
    return {
        "name": one.identity.name,
        "role": one.identity.role.value,
        "clients": [str(claim) for claim in one.identity.claims],
        "hosts": list(one.summary.hosts),
        "serial": one.summary.serial,
        "valid_until": one.summary.not_after.isoformat(),
        "revoked": None if one.revoked is None else one.revoked.isoformat(),
        "state": one.state(now),
    }


def renew(
    folder: Folder,
    names: Annotated[
        list[str] | None, typer.Argument(help="Names of parties. Default: all that expire soon.")
    ] = None,
    days: Days = pki.LEAF_DAYS,
    new_key: Annotated[
        bool, typer.Option("--new-key", help="Also make a new key on this machine, in NAME.key.")
    ] = False,
) -> None:
    """Issue certificates again, for the same party, clients and addresses.

    The key stays the same, so only NAME.pem must be replaced on the party's machine, even if the
    key was made there. A coordinator uses its new certificate for new connections; a host, when it
    connects again. No round is lost.

    potluck pki renew pki

    potluck pki renew pki lab-a coordinator
    """
    now = datetime.now(UTC)
    chosen = names or [
        name for name, left in register.expires_in(folder, now).items() if left < register.SOON
    ]
    if not chosen:
        typer.echo(f"No certificate expires within {register.SOON.days} days; nothing to renew.")
        return
    for name in chosen:
        path, old = register.renew(folder, name, days=days, new_key=new_key)
        typer.echo(f"{path}  renewed")
        typer.echo(f"  replaces certificate {old.summary.serial}, which is valid until ", nl=False)
        typer.echo(f"{old.summary.not_after:%Y-%m-%d}; to revoke the old certificate later:")
        typer.echo(f"  potluck pki revoke {folder} {name} --superseded")


def sign(
    folder: Folder,
    request: Annotated[
        Path,
        typer.Argument(
            help="Request file NAME.csr from `potluck-client enroll`.", show_default=False
        ),
    ],
    clients: Annotated[
        list[str] | None,
        typer.Option(
            help="Clients of the host. Default: those of its previous certificate.",
            show_default=False,
        ),
    ] = None,
    role: Annotated[Role, typer.Option(help="Role of the party.")] = Role.HOST,
    host: Annotated[
        list[str] | None,
        typer.Option(
            help="For a coordinator or relay: address that hosts dial.", show_default=False
        ),
    ] = None,
    days: Days = pki.LEAF_DAYS,
    force: Annotated[bool, typer.Option("--force", help="Replace NAME.pem if it exists.")] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="Sign without asking for confirmation.")
    ] = False,
) -> None:
    """Sign a certificate request, and write FOLDER/NAME.pem.

    The request was made on the machine that has the key. The options set the role and clients that
    the certificate gets. A request for another role, or for further clients, is refused. Compare
    the fingerprint with the one that the host's machine printed. Then copy NAME.pem and
    authority.pem to that machine.

    potluck pki sign pki lab-a.csr --clients client-0:5
    """
    granted = register.grant(folder, request, role, clients or ())
    identity = granted.identity
    typer.echo(f"{identity.role} {identity.name} of {identity.federation}")
    typer.echo(f"clients      {', '.join(map(str, identity.claims)) or 'none'}")
    typer.echo(f"fingerprint  {key_fingerprint(granted.public_key)}")
    if not yes:
        typer.confirm("Sign it?", abort=True)
    path = register.sign(folder, granted, hosts=host or (), days=days, force=force)
    typer.echo(f"certificate  {path}")


def revoke(
    folder: Folder,
    party: Annotated[
        str,
        typer.Argument(
            help="Name of a party, or beginning of a serial number.", show_default=False
        ),
    ],
    superseded: Annotated[
        bool,
        typer.Option(
            "--superseded", help="Revoke all certificates of the party except the newest."
        ),
    ] = False,
) -> None:
    """Revoke certificates, and list them in FOLDER/revoked.pem.

    A revocation takes effect once the coordinator has the list: within a second if `revoked` of its
    configuration names the file, otherwise after `potluck pki push`. From then on, open streams are
    ended and every call is refused, without a restart.

    potluck pki revoke pki lab-a

    potluck pki push pki
    """
    revoked = register.revoke(folder, party, superseded=superseded)
    for one in revoked:
        typer.echo(f"revoked  {one.summary.serial}  {one.identity.role} {one.identity.name}")
    if not revoked:
        typer.echo("No certificate was revoked: all were revoked before.")
    typer.echo(f"Tell the coordinator:\n  potluck pki push {folder}")


async def push(client: OperatorClient, folder: Folder) -> None:
    """Send FOLDER/revoked.pem to the coordinator, which disconnects the listed parties at once.

    potluck pki push pki --coordinator lab:7443
    """
    path = folder / pki.REVOKED
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigurationError(
            f"can't read {path} ({error.strerror}); create the file with `potluck pki init` or "
            "`potluck pki revoke`"
        ) from error
    revoked, new = await client.install_revocations(data)
    typer.echo(
        f"the coordinator {client.address} refuses {revoked} certificates, {new} of them "
        "from now on"
    )


# `potluck pki` ------------------------------------------------------------------------------------

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

Force = Annotated[bool, typer.Option("--force", help="Replace files that exist.")]


@app.command()
def init(
    folder: Annotated[
        Path, typer.Argument(help="Folder for the authority's files.", show_default=False)
    ],
    federation: Annotated[
        str, typer.Option(help="The federation's name: lower-case letters, digits, '.', '_', '-'.")
    ],
    days: Annotated[
        int, typer.Option(help="Number of days that the certificate is valid.")
    ] = pki.AUTHORITY_DAYS,
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
        typer.Argument(help="Name of the party; optional for a coordinator.", show_default=False),
    ] = None,
    clients: Annotated[
        list[str] | None,
        typer.Option(
            help="Client, or range such as client-0:23; repeatable.",
            show_default=False,
        ),
    ] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(
            help="Host name or IP address that hosts dial; repeatable.",
            show_default=False,
        ),
    ] = None,
    days: Annotated[
        int, typer.Option(help="Number of days that the certificate is valid.")
    ] = pki.LEAF_DAYS,
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
            f"a {role} needs a name; run `potluck pki issue {folder} {role} NAME`"
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
    file: Annotated[Path, typer.Argument(help="Certificate file, NAME.pem.", show_default=False)],
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
app.command("list")(list_issued)
app.command()(renew)
app.command()(sign)
app.command()(revoke)
app.command()(operator_command(push))


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
    print_line(
        console,
        f"Copy both files and {files.authority} to the {role}. The [tls] table of the {role}:",
    )
    print_line(console, f"  certificate = {json.dumps(str(files.certificate))}")
    print_line(console, f"  key = {json.dumps(str(files.key))}")
    print_line(console, f"  authority = {json.dumps(str(files.authority))}")
    print_next(console, command)
