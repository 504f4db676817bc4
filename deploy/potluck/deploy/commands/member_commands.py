"""`potluck pki root`, `member`, `members`, `renew-members`, `rotate`, `revoke-member`, `publish`.

They manage the members of a federation, whose keys are used in secure sums and for signatures.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from potluck.common.errors import ConfigurationError
from potluck.common.net.membership import ENDS_SOON, read_membership
from potluck.deploy.commands.connection import operator_command
from potluck.deploy.operator.operator_client import OperatorClient
from potluck.deploy.pki import federation_root
from potluck.deploy.terminal import print_line, print_next, terminal

Folder = Annotated[Path, typer.Argument(help="The root's folder.", show_default=False)]
Members = Annotated[
    list[str], typer.Argument(help="Clients, or ranges such as client-0:5.", show_default=False)
]
Days = Annotated[int, typer.Option(help="Days the records are valid; 365 at most.")]

_STYLES = {"ended": "red", "ends soon": "yellow", "valid": "green"}


def root(
    folder: Annotated[Path, typer.Argument(help="Folder to make it in.", show_default=False)],
    federation: Annotated[str, typer.Option(help="The federation's name, as in `pki init`.")],
    force: Annotated[bool, typer.Option("--force", help="Replace files that exist.")] = False,
) -> None:
    """Make a federation root: the key that says who is a member.

    It is another one than the TLS authority, which says who may connect. Keep the folder away from
    the coordinator; only root.pub and members.json go there, into `federation_root` and `members`
    of its configuration. Where one person holds both, signatures prove nothing against that person.

    potluck pki root root --federation demo
    """
    files = federation_root.create_root(folder, federation, force=force)
    console = terminal()
    console.print(Text(f"Root of federation {federation}", style="bold green"))
    for path in files:
        print_line(console, f"  {path}")
    print_next(console, f"potluck pki member {folder} client-0:5 --host NAME")


def member(
    folder: Folder,
    clients: Members,
    host: Annotated[str, typer.Option(help="The host that holds them.", show_default=False)],
    days: Days = federation_root.MEMBER_DAYS,
) -> None:
    """Make clients members: FOLDER/members/CLIENT.key for each, and the next epoch of members.json.

    A client that has a key keeps it and gets a new record. Whoever has seen an epoch takes no
    older members.json any more.

    potluck pki member root client-0:5 --host lab-a
    """
    enrolled = federation_root.add_members(folder, clients, host, days=days)
    console, keys = terminal(), enrolled.keys
    console.print(Text(f"{len(keys)} members on host {host}", style="bold green"))
    _print_epoch(console, folder, enrolled.epoch)
    print_line(console, f"Give the host its keys from {keys[0].parent}. In its configuration:")
    print_line(console, '  member_key = "FOLDER WITH CLIENT.key FILES"')
    print_line(console, "To sum securely it needs root.pub too, from you:")
    print_line(console, '  federation_root = "root.pub"')
    print_line(console, "members.json comes from the coordinator. From you as well, the")
    print_line(console, "coordinator can hold no newer one back:")
    print_line(console, '  members = "members.json"')
    print_line(console, "The coordinator needs root.pub and members.json. In its configuration:")
    print_line(console, f"  federation_root = {json.dumps(str(folder / 'root.pub'))}")
    print_line(console, f"  members = {json.dumps(str(folder / 'members.json'))}")
    print_line(console, "One that serves already takes it from:")
    print_line(console, f"  potluck pki publish {folder}", style="cyan")


def list_members(
    folder: Folder,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """List the members, until when their records are valid, and the keys that were revoked.

    potluck pki members root
    """
    document, now = read_membership(folder / "members.json"), datetime.now(UTC)
    if as_json:
        typer.echo(document.model_dump_json())
        return
    table = Table("client", "host", box=None)
    table.add_column("key", overflow="fold")
    table.add_column("until", min_width=10)
    table.add_column("state", min_width=max(map(len, _STYLES)))
    for each in document.members:
        left = each.not_after - now
        state = "ended" if left < timedelta(0) else "ends soon" if left < ENDS_SOON else "valid"
        key, until = each.public_key[:16], f"{each.not_after:%Y-%m-%d}"
        table.add_row(each.client, each.host, key, until, Text(state, style=_STYLES[state]))
    for gone in document.revoked:
        since = f"since epoch {gone.epoch}"
        table.add_row(gone.client, "", gone.public_key[:16], since, Text("revoked", style="red"))
    console = terminal()
    console.print(f"Federation {document.federation}, membership epoch {document.epoch}")
    console.print(table)


def renew_members(
    folder: Folder,
    clients: Annotated[
        list[str] | None, typer.Argument(help="Clients; all whose records end soon by default.")
    ] = None,
    days: Days = federation_root.MEMBER_DAYS,
) -> None:
    """Give members new records with the keys that they have, in the next epoch of members.json.

    Hosts need nothing but members.json, which the coordinator sends them. Nothing is interrupted.

    potluck pki renew-members root

    potluck pki publish root
    """
    document, renewed = federation_root.renew_members(
        folder, clients or (), soon=ENDS_SOON, days=days
    )
    if not renewed:
        typer.echo(f"No record ends within {ENDS_SOON.days} days; nothing to renew.")
        return
    console = terminal()
    console.print(Text(f"{len(renewed)} records renewed", style="bold green"))
    _print_epoch(console, folder, document.epoch)
    print_next(console, f"potluck pki publish {folder}")


def rotate(
    folder: Folder,
    clients: Members,
    switch: Annotated[
        bool, typer.Option("--switch", help="Have the next keys count, which hosts hold now.")
    ] = False,
    days: Days = federation_root.MEMBER_DAYS,
) -> None:
    """Replace members' keys in two steps, while everything goes on.

    First the next keys are made, FOLDER/members/next/CLIENT.key; give each to the host of its
    client, into the folder `next` beside the key it has. Then --switch makes the next epoch of
    members.json, which names them. A host signs with the key that the epoch it has seen names, and
    sums under way end with the key they began with.

    potluck pki rotate root client-0

    potluck pki rotate root client-0 --switch

    potluck pki publish root
    """
    console = terminal()
    if not switch:
        files = federation_root.make_next_keys(folder, clients)
        for path in files:
            print_line(console, f"{path}  (secret; mode 0600)")
        print_line(console, "Give them to their hosts, into the folder `next` in that of")
        print_line(console, "`member_key`; none has to be started anew. Then:")
        names = " ".join(clients)
        print_line(console, f"  potluck pki rotate {folder} {names} --switch", style="cyan")
        return
    enrolled = federation_root.use_next_keys(folder, clients, days=days)
    console.print(Text(f"{len(enrolled.keys)} members have other keys", style="bold green"))
    _print_epoch(console, folder, enrolled.epoch)
    print_next(console, f"potluck pki publish {folder}")


def revoke_member(folder: Folder, clients: Members) -> None:
    """Revoke members' keys and take their records away, in the next epoch of members.json.

    Where that epoch is known, nobody sums with them any more, and sums under way go on without
    them. They may still connect: `potluck pki revoke` revokes the certificate of a host.

    potluck pki revoke-member root client-3

    potluck pki publish root
    """
    document = federation_root.revoke_members(folder, clients)
    console = terminal()
    for each in document.revoked:
        if each.epoch == document.epoch:
            print_line(console, f"revoked  {each.client}  key {each.public_key[:16]}…")
    _print_epoch(console, folder, document.epoch)
    print_line(console, "Hosts that a coordinator you don't trust may leave in the dark get")
    print_line(console, "members.json from you, too.")
    print_next(console, f"potluck pki publish {folder}")


async def publish(client: OperatorClient, folder: Folder) -> None:
    """Send FOLDER/members.json to the coordinator, which sends it to all hosts that attend.

    It counts at once; nothing has to be started anew.

    potluck pki publish root --coordinator lab:7443
    """
    path = folder / "members.json"
    try:
        document = path.read_bytes()
    except OSError as error:
        raise ConfigurationError(
            f"{path} can't be read ({error.strerror}); make it with `potluck pki root`"
        ) from error
    ours = read_membership(path).epoch
    answer = await client.install_membership(document)
    if answer.epoch > ours:
        raise ConfigurationError(
            f"{client.address} has membership epoch {answer.epoch} already, {path} is of epoch "
            f"{ours}; find the newer file: a party that has seen an epoch rejects older ones"
        )
    since = "from now on" if answer.taken else "as before"
    found = f"membership epoch {answer.epoch} with {answer.members} members"
    typer.echo(f"{client.address} has {found}, {since}")


def add_to(app: typer.Typer) -> None:
    """Add these commands to `app`, which is `potluck pki`."""
    app.command()(root)
    app.command()(member)
    app.command("members")(list_members)
    app.command("renew-members")(renew_members)
    app.command()(rotate)
    app.command("revoke-member")(revoke_member)
    app.command()(operator_command(publish))


def _print_epoch(console: Console, folder: Path, epoch: int) -> None:
    print_line(console, f"{folder / 'members.json'} is of membership epoch {epoch}")
