"""Checks of `potluck doctor` on a party: admission of a host, membership, trainings with noise."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path

import grpc.aio

from potluck.client.base.state_directory import PRIVACY
from potluck.client.config import ClientConfig
from potluck.client.disclosure.disclosure_policy import AVAILABILITY, DisclosurePolicy
from potluck.client.disclosure.member_keys import key_in_force
from potluck.common.errors import PotluckError, RoundClosedError, UnreachableError
from potluck.common.net.connection_errors import connection_error
from potluck.common.net.membership import Members, load_members, troubles_of
from potluck.common.net.membership_in_force import KEPT
from potluck.common.net.tls import channel
from potluck.common.records.privacy_loss import NEAR_LIMIT
from potluck.common.settings.extras import require
from potluck.common.settings.plugins import QUESTIONS, find, integration
from potluck.deploy.doctor.diagnosis import Finding, Verdict
from potluck.rpc.v1 import coordinator_pb2, coordinator_pb2_grpc
from potluck.server.config import CoordinatorConfig

# Admission of a host ------------------------------------------------------------------------------
# The check connects with the host's own certificate. A valid certificate may have been revoked, or
# may not allow a client that the configuration names. Only the coordinator can report that.

ANSWER_SECONDS = 15.0
_NO_UPDATE = "doctor"
"""Id of an update that does not exist; only a coordinator that admits the host says so in its
error."""


def admission(config: ClientConfig) -> Finding:
    """Check that the coordinator admits the host, by a request about an unknown update. Blocks."""
    try:
        asyncio.run(_ask(config))
    except RoundClosedError:
        return Finding(
            "coordinator", Verdict.OK, f"the coordinator {config.coordinator} admits this host"
        )
    except TimeoutError:
        found = f"the coordinator {config.coordinator} did not answer within {ANSWER_SECONDS:.0f} s"
        remedy = "check the address, and that no firewall drops packets to its port"
        return Finding("coordinator", Verdict.ERROR, found, remedy)
    except UnreachableError as error:
        found, _, remedy = error.message.partition("; ")
        return Finding(
            "coordinator", Verdict.WARNING, found, remedy or "check that the coordinator runs"
        )
    except PotluckError as error:
        found, _, remedy = error.message.partition("; ")
        return Finding("coordinator", Verdict.ERROR, found, remedy or "see the coordinator's log")
    return Finding(
        "coordinator", Verdict.OK, f"the coordinator {config.coordinator} admits this host"
    )


async def _ask(config: ClientConfig) -> None:
    async with asyncio.timeout(ANSWER_SECONDS), channel(config.coordinator, config.tls) as link:
        stub: coordinator_pb2_grpc.CoordinatorServiceAsyncStub = (
            coordinator_pb2_grpc.CoordinatorServiceStub(link)
        )
        for client in config.client_ids()[:1]:
            request = coordinator_pb2.LocateUploadRequest(update_id=_NO_UPDATE, client_id=client)
            try:
                await stub.LocateUpload(request)
            except grpc.aio.AioRpcError as error:
                raise connection_error(error, config.coordinator, config.tls) from error


# Membership ---------------------------------------------------------------------------------------

_MEMBERSHIP = "membership"
_SHOWN = 3


def coordinator_membership(config: CoordinatorConfig, now: datetime) -> Iterable[Finding]:
    """Check a coordinator's membership; no findings if the federation has no root."""
    if config.federation_root is None or config.members is None:
        return
    try:
        members = _newest(
            config.federation_root,
            [config.members, config.state_directory / KEPT],
            config.tls.load().identity.federation,
        )
    except PotluckError as error:
        yield _bad(error)
        return
    yield _finding(members, tuple(members.records), now)


def host_membership(config: ClientConfig, now: datetime) -> Iterable[Finding]:
    """Check a host's membership; no findings if its configuration names no federation root."""
    if config.federation_root is None:
        return
    kept = config.state_directory / KEPT
    files = [kept] if config.members is None else [config.members, kept]
    if config.members is None and not kept.exists():
        found = "this host has not received a membership yet"
        remedy = (
            "connect to a coordinator that has a membership, or set `members` to the "
            "operator's file"
        )
        yield Finding(_MEMBERSHIP, Verdict.WARNING, found, remedy)
        return
    clients = config.client_ids()
    try:
        federation = config.tls.load().identity.federation
        members = _newest(config.federation_root, files, federation)
        if config.member_key is not None:
            for client in clients:
                if client in members.records:
                    key_in_force(config.member_key, client, members.records[client])
    except PotluckError as error:
        yield _bad(error)
        return
    yield _finding(members, clients, now)


def _newest(root: Path, files: Sequence[Path], federation: str) -> Members:
    """Return the membership of the highest epoch among `files`; the first file must exist."""
    there = [files[0], *(path for path in files[1:] if path.exists())]
    found = [load_members(path, root, federation=federation) for path in there]
    return max(found, key=lambda members: members.epoch)


def _finding(members: Members, clients: Sequence[str], now: datetime) -> Finding:
    found = f"epoch {members.epoch} with {len(members.records)} members"
    troubles = [each.partition("; ")[0] for each in troubles_of(members, clients, now)]
    if not troubles:
        return Finding(_MEMBERSHIP, Verdict.OK, found)
    shown, more = "; ".join(troubles[:_SHOWN]), len(troubles) - _SHOWN
    return Finding(
        _MEMBERSHIP,
        Verdict.WARNING,
        f"{found}; {shown}" + f"; and {more} more" * (more > 0),
        "renew records with `potluck pki renew-members`, then `potluck pki publish`",
    )


def _bad(error: PotluckError) -> Finding:
    found, _, remedy = error.message.partition("; ")
    return Finding(_MEMBERSHIP, Verdict.ERROR, found, remedy)


# Trainings with noise -----------------------------------------------------------------------------

_NOISE = "noise"
_LIBRARIES = ("dp_accounting", "opacus")
_NAMED = 5


def private_trainings(config: ClientConfig) -> Iterable[Finding]:
    """Return the findings on a host that trains with noise; none for a host that never has.

    The check requires `potluck[privacy]` if the host's owner allows only updates with noise, or if
    the host has privacy ledgers.
    """
    policy, folder = config.disclosure, config.state_directory / PRIVACY
    only = policy.updates == "private"
    if only:
        yield from _unanswered(policy)
    if not only and not (folder.is_dir() and any(folder.iterdir())):
        return
    try:
        for library in _LIBRARIES:
            require(library, "potluck[privacy]")
        values = integration("privacy-report")(config.state_directory, policy).values()
    except PotluckError as error:
        found, _, remedy = error.message.partition("; ")
        yield Finding(_NOISE, Verdict.ERROR, found, remedy)
        return
    spent = {
        each["client"]: each["training"]["epsilon_spent"] for each in json.loads(values)["clients"]
    }
    limit = policy.training_limit
    near = [client for client, loss in spent.items() if loss >= NEAR_LIMIT * limit]
    found = (
        f"{len(spent)} clients with a privacy ledger; largest ε "
        f"{max(spent.values(), default=0.0):.4g} of {limit:g}"
    )
    if not near:
        yield Finding(_NOISE, Verdict.OK, found)
        return
    more = f" and {len(near) - _NAMED} more" if len(near) > _NAMED else ""
    yield Finding(
        _NOISE,
        Verdict.WARNING,
        f"{found}; clients near the limit: {', '.join(near[:_NAMED])}{more}",
        "the host will refuse further trainings of these clients; the data owner can raise "
        "disclosure.training_epsilon",
    )


def _unanswered(policy: DisclosurePolicy) -> Iterable[Finding]:
    """Return a warning if the owner allows questions that are never answered with noise."""
    found = [kind for kind in policy.questions if not _answered_with_noise(kind)]
    if found:
        yield Finding(
            _NOISE,
            Verdict.WARNING,
            f"disclosure.questions allows {', '.join(found)}, which can't be answered with noise, "
            'and updates = "private" refuses answers without noise',
            "remove these questions from disclosure.questions; `potluck select --privacy record` "
            "lists the selectors that work with noise",
        )


def _answered_with_noise(kind: str) -> bool:
    """Return True if a question has a form with noise, or is not about data."""
    if kind == AVAILABILITY:
        return True
    try:
        return bool(find(QUESTIONS, kind).hides_records)
    except PotluckError:
        return False
