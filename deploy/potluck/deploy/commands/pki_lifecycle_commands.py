"""`potluck pki list`, `renew`, `sign`, `revoke` and `push`: they manage issued certificates."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from potluck.common.errors import ConfigurationError
from potluck.common.net.identity import Role
from potluck.common.net.key_files import key_fingerprint
from potluck.deploy.commands.connection import operator_command
from potluck.deploy.operator.operator_client import OperatorClient
from potluck.deploy.pki import authority as pki
from potluck.deploy.pki import certificate_register as register
from potluck.deploy.terminal import terminal

Folder = Annotated[Path, typer.Argument(help="The authority's folder.", show_default=False)]
Days = Annotated[int, typer.Option(help="Days it is valid.")]

_STYLES = {"revoked": "red", "expired": "red", "expires soon": "yellow", "valid": "green"}


def list_issued(
    folder: Folder,
    everything: Annotated[
        bool, typer.Option("--all", help="Also list expired and replaced certificates.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """List the certificates that an authority has issued, with their states.

    Without --all, it lists the newest of each party, and all that were revoked.
    """
    now = datetime.now(UTC)
    issued = register.issued(folder)
    if not everything:
        newest = {one.identity.name: one.summary.serial for one in issued}
        current = set(newest.values())
        issued = [one for one in issued if one.summary.serial in current or one.revoked is not None]
    if as_json:
        typer.echo(json.dumps([_fields(one, now) for one in issued]))
        return
    table = Table("name", "role", "clients or addresses", box=None)
    table.add_column("serial", overflow="fold")
    table.add_column("until", min_width=10)
    table.add_column("state", min_width=max(map(len, _STYLES)))
    for one in issued:
        what = one.summary.hosts or tuple(str(claim) for claim in one.identity.claims)
        state = one.state(now)
        table.add_row(
            one.identity.name,
            one.identity.role.value,
            ", ".join(what),
            one.summary.serial,
            f"{one.summary.not_after:%Y-%m-%d}",
            Text(state, style=_STYLES.get(state, "")),
        )
    terminal().print(table)


def _fields(one: register.Issued, now: datetime) -> dict[str, object]:
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
        list[str] | None, typer.Argument(help="Parties; all that expire soon by default.")
    ] = None,
    days: Days = pki.LEAF_DAYS,
    new_key: Annotated[
        bool, typer.Option("--new-key", help="Also make a new key here, in NAME.key.")
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
        typer.echo(f"  {old.summary.serial}, which it replaces, counts until ", nl=False)
        typer.echo(f"{old.summary.not_after:%Y-%m-%d}; to end it once the new one is in use:")
        typer.echo(f"  potluck pki revoke {folder} {name} --superseded")


def sign(
    folder: Folder,
    request: Annotated[
        Path, typer.Argument(help="NAME.csr of `potluck-client enroll`.", show_default=False)
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
            help="For a coordinator or relay: addresses that hosts dial.", show_default=False
        ),
    ] = None,
    days: Days = pki.LEAF_DAYS,
    force: Annotated[bool, typer.Option("--force", help="Replace NAME.pem.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Sign without asking.")] = False,
) -> None:
    """Sign a request that was made where the key is: FOLDER/NAME.pem.

    The options set the role and clients that the certificate gets. A request for another role, or
    for further clients, is refused. Compare the fingerprint with the one that the host's machine
    printed. Then copy NAME.pem and authority.pem to that machine.

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
        str, typer.Argument(help="A party's name, or one serial number.", show_default=False)
    ],
    superseded: Annotated[
        bool, typer.Option("--superseded", help="Revoke all except its newest certificate.")
    ] = False,
) -> None:
    """Revoke certificates: FOLDER/revoked.pem.

    It takes effect once the coordinator has the list: within a second if `revoked` of its
    configuration names the file, otherwise after `potluck pki push`. From then on, open streams are
    ended and every call is refused, without a restart.

    potluck pki revoke pki lab-a

    potluck pki push pki
    """
    revoked = register.revoke(folder, party, superseded=superseded)
    for one in revoked:
        typer.echo(f"revoked  {one.summary.serial}  {one.identity.role} {one.identity.name}")
    if not revoked:
        typer.echo("Nothing to revoke that was not revoked before.")
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
            f"{path} can't be read ({error.strerror}); `potluck pki init` and `potluck pki "
            "revoke` write it"
        ) from error
    revoked, new = await client.install_revocations(data)
    typer.echo(f"{client.address} refuses {revoked} certificates, {new} of them from now on")


def add_to(app: typer.Typer) -> None:
    """Add these commands to `app`, which is `potluck pki`."""
    app.command("list")(list_issued)
    app.command()(renew)
    app.command()(sign)
    app.command()(revoke)
    app.command()(operator_command(push))
