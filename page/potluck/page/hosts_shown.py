"""Views of hosts and their clients for the web UI. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from potluck.deploy.view.listings import attendance_line
from potluck.deploy.view.readable import natural_order
from potluck.page.page_shapes import ClientShown, CoordinatorShown, HostShown, HostsShown
from potluck.page.run_shown import moment
from potluck.rpc.v1 import operator_pb2


def shown_hosts(clients: Sequence[operator_pb2.ClientStatus]) -> HostsShown:
    """Return all clients by host, connected hosts first; numbers in names are sorted by value."""
    held: dict[str, list[operator_pb2.ClientStatus]] = {}
    for client in clients:
        held.setdefault(client.host_id, []).append(client)
    hosts = [_host(name, mine) for name, mine in held.items()]
    hosts.sort(key=lambda host: (not host.attending, natural_order(host.host)))
    return HostsShown(summary=attendance_line(clients), hosts=hosts)


def _host(name: str, clients: Sequence[operator_pb2.ClientStatus]) -> HostShown:
    """Return the view of a host, from the status of its most recently seen client."""
    newest = max(clients, key=lambda each: (each.attending, each.last_seen.ToNanoseconds()))
    return HostShown(
        host=name,
        attending=any(each.attending for each in clients),
        last_seen=moment(newest.last_seen),
        device=newest.device,
        version=newest.software_version,
        relay=newest.relay,
        tags=" ".join(f"{key}={value}" for key, value in sorted(newest.tags.items())),
        certificate_expires_at=moment(newest.certificate_expires_at),
        clients=[
            ClientShown(
                client=each.client_id,
                selected=each.selected,
                included=each.included,
                note=_note(each),
            )
            for each in sorted(clients, key=lambda each: natural_order(each.client_id))
        ],
    )


def _note(client: operator_pb2.ClientStatus) -> str:
    notes = [f"in quarantine: {client.quarantine_reason}"] if client.quarantined else []
    notes += [f"excluded from run {run}: {why}" for run, why in sorted(client.left_out.items())]
    return "; ".join(notes)


def shown_coordinator(described: operator_pb2.DescribeCoordinatorResponse) -> CoordinatorShown:
    """Return the view of the coordinator, from its own description."""
    return CoordinatorShown(
        version=described.software_version,
        hosts=described.hosts_attending,
        clients=described.clients_attending,
        certificate_expires_at=moment(described.certificate_expires_at),
        disk_free=described.disk_free_bytes,
        disk_size=described.disk_size_bytes,
    )
