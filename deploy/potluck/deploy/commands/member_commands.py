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

Folder = Annotated[Path, typer.Argument(help="Folder of the federation root.", show_default=False)]
Members = Annotated[
    list[str], typer.Argument(help="Clients, or ranges such as client-0:5.", show_default=False)
]
Days = Annotated[int, typer.Option(help="Number of days for which records are valid, at most 365.")]

_STYLES = {"ended": "red", "ends soon": "yellow", "valid": "green"}


def root(
    folder: Annotated[
        Path, typer.Argument(help="Folder to create for the root's files.", show_default=False)
    ],
    federation: Annotated[str, typer.Option(help="The federation's name, as in `pki init`.")],
    force: Annotated[bool, typer.Option("--force", help="Replace files that exist.")] = False,
) -> None:
    """Make a federation root: the key that signs the list of members.

    It is separate from the TLS authority, which decides who may connect. Keep the folder away from
    the coordinator. The coordinator gets only root.pub and members.json, as `federation_root` and
    `members` of its configuration. If one person has both the root and the coordinator, signatures
    prove nothing against that person.

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
    host: Annotated[
        str, typer.Option(help="Name of the host of these clients.", show_default=False)
    ],
    days: Days = federation_root.MEMBER_DAYS,
) -> None:
    """Make clients members of the federation.

    Writes FOLDER/members/CLIENT.key for each client, and the next epoch of FOLDER/members.json. A
    client that has a key keeps it and gets a new record. A party that has seen an epoch rejects
    older members.json files.

    potluck pki member root client-0:5 --host lab-a
    """
    enrolled = federation_root.add_members(folder, clients, host, days=days)
    console, keys = terminal(), enrolled.keys
    console.print(Text(f"{len(keys)} members on host {host}", style="bold green"))
    _print_epoch(console, folder, enrolled.epoch)
    print_line(
        console, f"Copy the keys in {keys[0].parent} to the host. Add to the host's configuration:"
    )
    print_line(console, '  member_key = "FOLDER WITH CLIENT.key FILES"')
    print_line(console, "For secure sums, the host also needs the file root.pub, from you:")
    print_line(console, '  federation_root = "root.pub"')
    print_line(
        console,
        "The coordinator sends members.json to the host. If you also copy the file to the host,",
    )
    print_line(console, "the coordinator can't withhold a newer version:")
    print_line(console, '  members = "members.json"')
    print_line(
        console,
        "The coordinator needs root.pub and members.json. Add to the coordinator's configuration:",
    )
    print_line(console, f"  federation_root = {json.dumps(str(folder / 'root.pub'))}")
    print_line(console, f"  members = {json.dumps(str(folder / 'members.json'))}")
    print_line(console, "If the coordinator is already running, send it members.json with:")
    print_line(console, f"  potluck pki publish {folder}", style="cyan")


def list_members(
    folder: Folder,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """List the members, the end of their records' validity, and the revoked keys.

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
        list[str] | None, typer.Argument(help="Clients. Default: all whose records end soon.")
    ] = None,
    days: Days = federation_root.MEMBER_DAYS,
) -> None:
    """Give members new records with their current keys, in the next epoch of members.json.

    Hosts need only the new members.json, which the coordinator sends them. Runs are not
    interrupted.

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
    console.print(Text(f"renewed {len(renewed)} member records", style="bold green"))
    _print_epoch(console, folder, document.epoch)
    print_next(console, f"potluck pki publish {folder}")


def rotate(
    folder: Folder,
    clients: Members,
    switch: Annotated[
        bool, typer.Option("--switch", help="Activate the next keys, once all hosts have them.")
    ] = False,
    days: Days = federation_root.MEMBER_DAYS,
) -> None:
    """Replace members' keys in two steps, without interrupting runs.

    The first step makes the next keys, FOLDER/members/next/CLIENT.key. Copy each to the host of its
    client, into the folder `next` next to the current key. Then --switch makes the next epoch of
    members.json, with the new keys. A host signs with the key of the newest epoch that it has seen.
    Running sums end with the keys with which they began.

    potluck pki rotate root client-0

    potluck pki rotate root client-0 --switch

    potluck pki publish root
    """
    console = terminal()
    if not switch:
        files = federation_root.make_next_keys(folder, clients)
        for path in files:
            print_line(console, f"{path}  (secret; mode 0600)")
        print_line(
            console,
            "Copy each key to the host of its client, into the folder `next` "
            "inside the host's folder",
        )
        print_line(console, "`member_key`; no host needs a restart. Then run:")
        names = " ".join(clients)
        print_line(console, f"  potluck pki rotate {folder} {names} --switch", style="cyan")
        return
    enrolled = federation_root.use_next_keys(folder, clients, days=days)
    console.print(Text(f"{len(enrolled.keys)} members have new keys", style="bold green"))
    _print_epoch(console, folder, enrolled.epoch)
    print_next(console, f"potluck pki publish {folder}")


def revoke_member(folder: Folder, clients: Members) -> None:
    """Revoke members' keys and remove their records, in the next epoch of members.json.

    Hosts that have that epoch no longer take part in sums with these members, and running sums
    continue without them. The members may still connect: `potluck pki revoke` revokes the
    certificate of a host.

    potluck pki revoke-member root client-3

    potluck pki publish root
    """
    document = federation_root.revoke_members(folder, clients)
    console = terminal()
    for each in document.revoked:
        if each.epoch == document.epoch:
            print_line(console, f"revoked  {each.client}  key {each.public_key[:16]}…")
    _print_epoch(console, folder, document.epoch)
    print_line(
        console,
        "If you don't trust the coordinator to send members.json to every host, "
        "copy the file to the",
    )
    print_line(console, "hosts, too.")
    print_next(console, f"potluck pki publish {folder}")


async def publish(client: OperatorClient, folder: Folder) -> None:
    """Send FOLDER/members.json to the coordinator, which sends it to all connected hosts.

    It is valid at once, without a restart.

    potluck pki publish root --coordinator lab:7443
    """
    path = folder / "members.json"
    try:
        document = path.read_bytes()
    except OSError as error:
        raise ConfigurationError(
            f"can't read {path} ({error.strerror}); create the file with `potluck pki root`"
        ) from error
    ours = read_membership(path).epoch
    answer = await client.install_membership(document)
    if answer.epoch > ours:
        raise ConfigurationError(
            f"the coordinator {client.address} already has membership epoch {answer.epoch}, but "
            f"{path} has epoch {ours}; find the newer file: a party that has seen an epoch "
            "rejects older epochs"
        )
    since = "from now on" if answer.taken else "as before"
    found = f"membership epoch {answer.epoch} with {answer.members} members"
    typer.echo(f"the coordinator {client.address} has {found}, {since}")


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
    print_line(console, f"{folder / 'members.json'} now has membership epoch {epoch}")
