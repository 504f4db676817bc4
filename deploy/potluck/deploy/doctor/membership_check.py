"""Checks that a party's membership can be used, and how long its records are valid."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path

from potluck.client.config import ClientConfig
from potluck.client.disclosure.member_keys import key_in_force
from potluck.common.errors import PotluckError
from potluck.common.net.membership import Members, load_members, troubles_of
from potluck.common.net.membership_in_force import KEPT
from potluck.deploy.doctor.diagnosis import Finding, Verdict
from potluck.server.config import CoordinatorConfig

_ABOUT = "membership"
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
        found = "none has come yet"
        remedy = "attend a coordinator that has one, or set `members` to the operator's file"
        yield Finding(_ABOUT, Verdict.WARNING, found, remedy)
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
    """Return the members of the highest epoch among `files`; the first file must exist."""
    there = [files[0], *(path for path in files[1:] if path.exists())]
    found = [load_members(path, root, federation=federation) for path in there]
    return max(found, key=lambda members: members.epoch)


def _finding(members: Members, clients: Sequence[str], now: datetime) -> Finding:
    found = f"epoch {members.epoch} with {len(members.records)} members"
    troubles = [each.partition("; ")[0] for each in troubles_of(members, clients, now)]
    if not troubles:
        return Finding(_ABOUT, Verdict.OK, found)
    shown, more = "; ".join(troubles[:_SHOWN]), len(troubles) - _SHOWN
    return Finding(
        _ABOUT,
        Verdict.WARNING,
        f"{found}; {shown}" + f"; and {more} more" * (more > 0),
        "renew records with `potluck pki renew-members`, then `potluck pki publish`",
    )


def _bad(error: PotluckError) -> Finding:
    found, _, remedy = error.message.partition("; ")
    return Finding(_ABOUT, Verdict.ERROR, found, remedy)
