"""The certificates and keys of the parties in an inventory, from the authority's folder."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from potluck.client.disclosure.member_keys import NEXT
from potluck.common.errors import ConfigurationError
from potluck.common.net.identity import Role, expand_clients
from potluck.common.net.membership import read_membership
from potluck.common.net.tls import TlsFiles
from potluck.deploy.machines.desired_state import PartyFiles
from potluck.deploy.machines.inventory import Inventory, MachineSettings
from potluck.deploy.machines.party_settings import COORDINATOR, HostSettings, RelaySettings
from potluck.deploy.pki import authority as pki
from potluck.deploy.pki.certificates import inspect


@dataclass(frozen=True, kw_only=True, slots=True)
class Party:
    """A coordinator, relay or host that needs a certificate.

    clients: the clients in its certificate. names: DNS names and IP addresses at which a
    coordinator or relay is dialled.
    """

    name: str
    role: Role
    clients: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    member_keys: Path | None = None


def parties_on(machines: Iterable[MachineSettings], inventory: Inventory) -> list[Party]:
    """Return the parties of these machines, the coordinator first."""
    found: list[Party] = []
    for machine in machines:
        settings = inventory.coordinator
        if settings is not None and settings.machine == machine.name:
            names = _names(inventory.address, settings.names)
            found.insert(0, Party(name=COORDINATOR, role=Role.COORDINATOR, names=names))
        found += [_relay(relay, inventory) for relay in machine.relays]
        found += [_host(host, inventory) for host in machine.hosts]
    return found


def _names(address: str, further: Iterable[str]) -> tuple[str, ...]:
    """Return the DNS names and IP addresses at which a party is dialled. address: HOST:PORT."""
    return tuple(dict.fromkeys([address.rpartition(":")[0].strip("[]"), *further]))


def _relay(relay: RelaySettings, inventory: Inventory) -> Party:
    clients, names = inventory.behind(relay.name), _names(relay.address, relay.names)
    return Party(name=relay.name, role=Role.RELAY, clients=clients, names=names)


def _host(host: HostSettings, inventory: Inventory) -> Party:
    keys = inventory.member_keys_of(host)
    return Party(name=host.name, role=Role.HOST, clients=host.clients, member_keys=keys)


def missing(parties: Iterable[Party], folder: Path) -> list[Party]:
    """Return the parties that have no certificate yet."""
    return [party for party in parties if not (folder / f"{party.name}.pem").exists()]


def issue_missing(parties: Iterable[Party], inventory: Inventory) -> list[Path]:
    """Issue missing certificates. Return their files. Raises the errors of `pki.issue`."""
    folder = inventory.pki
    if not (folder / f"{pki.AUTHORITY}.pem").exists():
        pki.create_authority(folder, inventory.federation)
    return [
        pki.issue(
            folder, party.role, party.name, clients=party.clients, hosts=party.names
        ).certificate
        for party in missing(parties, folder)
    ]


def read_files(party: Party, inventory: Inventory) -> PartyFiles:
    """Return a party's files, checked against the inventory.

    Raises ConfigurationError or IdentityError if files are missing, have expired, or belong to
    another party.
    """
    folder = inventory.pki
    files = TlsFiles(
        certificate=folder / f"{party.name}.pem",
        key=folder / f"{party.name}.key",
        authority=folder / f"{pki.AUTHORITY}.pem",
    )
    if files.certificate.exists() and not files.key.exists():
        raise ConfigurationError(
            f"the private key {files.key} is not on this machine, because host {party.name} "
            "created it and keeps it. Start this host by hand or with systemd, and remove the "
            "host from the inventory"
        )
    material = files.load(party.role)
    if material.identity.federation != inventory.federation:
        raise ConfigurationError(
            f"{files.certificate} belongs to federation {material.identity.federation}, but the "
            f"inventory to federation {inventory.federation}"
        )
    _check_coverage(party, files)
    tls = {
        "certificate.pem": material.certificate,
        "key.pem": material.key,
        "authority.pem": material.authority,
    }
    if party.role is not Role.HOST:
        tls["revoked.pem"] = _read(folder / pki.REVOKED)
    others: dict[str, bytes] = {}
    if inventory.federation_root is not None and party.role is not Role.RELAY:
        tls["members.json"] = _members(party, inventory, inventory.federation_root)
        others["root.pub"] = _read(inventory.federation_root / "root.pub")
    return PartyFiles(tls={**tls, **_member_keys(party)}, others=others)


def _check_coverage(party: Party, files: TlsFiles) -> None:
    summary = inspect(files.certificate)
    lacking = [name for name in party.names if name not in summary.hosts]
    flags = "".join(f" --host {name}" for name in party.names)
    if summary.identity is not None and party.clients:
        clients = expand_clients(party.clients)
        lacking += [each for each in clients if not summary.identity.may_speak_for(each)]
        flags += "".join(f" --clients {text}" for text in party.clients)
    if lacking:
        raise ConfigurationError(
            f"the certificate {files.certificate} does not name {lacking[0]}; issue a new "
            f"certificate with `potluck pki issue {files.certificate.parent} {party.role} "
            f"{party.name}{flags} --force`"
        )


def _members(party: Party, inventory: Inventory, folder: Path) -> bytes:
    """Return the content of members.json, which must include the party's clients."""
    path = folder / "members.json"
    document = read_membership(path)
    if document.federation != inventory.federation:
        raise ConfigurationError(
            f"{path} belongs to federation {document.federation}, but the inventory to federation "
            f"{inventory.federation}"
        )
    host_of = {each.client: each.host for each in document.members}
    for client in expand_clients(party.clients):
        if host_of.get(client) != party.name:
            raise ConfigurationError(
                f"{path} has no record of client {client} on host {party.name}; create the record "
                f"with `potluck pki member {folder} {client} --host {party.name}`"
            )
    return _read(path)


def _member_keys(party: Party) -> dict[str, bytes]:
    if party.member_keys is None:
        return {}
    names = [f"{client}.key" for client in expand_clients(party.clients)]
    following = [f"{NEXT}/{name}" for name in names if (party.member_keys / NEXT / name).exists()]
    return {f"members/{name}": _read(party.member_keys / name) for name in [*names, *following]}


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"can't read {path} ({error.strerror})") from error
