"""A host's record of selections, which survives restarts."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from support.memberships import signed, write_root
from support.secure_sums import member_key, member_record

from potluck.client.disclosure.disclosure_policy import DisclosurePolicy
from potluck.client.handlers.training_handler import permitted_weighting
from potluck.common.errors import DisclosureRefusedError
from potluck.common.net.key_files import KEY_MODE, private_pem, write_file
from potluck.common.net.membership_in_force import MembershipInForce
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.verifiable.documents import (
    COORDINATOR,
    Attendees,
    BrokenSelectionError,
    Opening,
    Speaker,
    commitment_to,
    genesis,
    receipt,
)
from potluck.verifiable.host.committed_selections import CommittedSelections

RUN, CLIENT, SHARE = "../run", "client-0", "11" * 32


def instruction(client: str = CLIENT, **document: bytes) -> rpc.Instruction:
    selection = rpc.SelectionDocument(**document)
    return rpc.Instruction(client_id=client, run_id=RUN, round=1, selection=selection)


def opened() -> bytes:
    previous = genesis(RUN)
    return Opening(
        previous=previous,
        run=RUN,
        rounds=1,
        round=1,
        attempt=1,
        selector="uniform",
        count=1,
        inputs_sha256="22" * 32,
        commitment=commitment_to(SHARE, previous, COORDINATOR),
    ).encode()


def attendees(commitment: str, *others: str) -> bytes:
    return Attendees(
        previous=Opening.digest_of(opened()),
        available=(CLIENT, *others),
        speakers=(Speaker(client=CLIENT, commitment=commitment),),
    ).encode()


def test_a_host_that_restarts_reveals_the_same_share_for_one_list_only(tmp_path: Path) -> None:
    commitment = (
        CommittedSelections(tmp_path, None, None).take(instruction(opening=opened())).commitment
    )
    restarted = CommittedSelections(tmp_path, None, None)
    assert restarted.take(instruction(opening=opened())).commitment == commitment
    share = restarted.take(instruction(attendees=attendees(commitment))).share
    assert commitment_to(share, Opening.digest_of(opened()), CLIENT) == commitment
    again = CommittedSelections(tmp_path, None, None)
    assert again.take(instruction(attendees=attendees(commitment))).share == share
    with pytest.raises(BrokenSelectionError, match="one list only"):
        again.take(instruction(attendees=attendees(commitment, "client-1")))
    assert [each for each in tmp_path.iterdir() if each.name != "selections"] == []


@pytest.mark.parametrize("restarts", [False, True])
def test_a_host_makes_one_commitment_only_to_each_seed(tmp_path: Path, *, restarts: bool) -> None:
    """A coordinator with several shares of a host could leave some out until it likes the seed."""
    host = CommittedSelections(tmp_path, None, None)
    commitment = host.take(instruction(opening=opened())).commitment
    if restarts:
        host = CommittedSelections(tmp_path, None, None)
    for document in (
        {"opening": opened()},
        {"attendees": attendees(commitment, "client-1")},
    ):
        with pytest.raises(BrokenSelectionError, match="'client-0' already speaks for this host"):
            host.take(instruction("client-1", **document))
    assert host.take(instruction(attendees=attendees(commitment, "client-1"))).share


def test_two_speakers_of_one_host_are_refused_if_the_membership_is_known(tmp_path: Path) -> None:
    """Also those of another host, which may be the coordinator's."""
    now = datetime.now(UTC)
    dates = {"not_before": now - timedelta(days=1), "not_after": now + timedelta(days=1)}
    on = {CLIENT: "mine", "client-1": "theirs", "client-2": "theirs", "client-3": "third"}
    records = [member_record(client, host=host, **dates) for client, host in on.items()]
    members = tmp_path / "members.json"
    members.write_bytes(signed(*records))
    in_force = MembershipInForce(
        write_root(tmp_path), federation="f", file=members, state_directory=tmp_path
    )
    key = tmp_path / "member.key"
    write_file(key, private_pem(member_key(CLIENT)), KEY_MODE)
    host = CommittedSelections(tmp_path, key, in_force)
    found = host.take(instruction(opening=opened()))
    opening = Opening.digest_of(opened())

    def speaker(client: str) -> Speaker:
        commitment = found.commitment if client == CLIENT else commitment_to(SHARE, opening, client)
        signature = member_key(client).sign(receipt(opening, client, commitment))
        return Speaker(client=client, commitment=commitment, signature=signature.hex())

    def listed(*clients: str) -> rpc.Instruction:
        speakers = tuple(map(speaker, clients))
        document = Attendees(previous=opening, available=tuple(on), speakers=speakers)
        return instruction(attendees=document.encode())

    with pytest.raises(BrokenSelectionError, match="two clients of one host"):
        host.take(listed(*on))
    assert host.take(listed(CLIENT, "client-2", "client-3")).share


def test_two_hosts_have_different_shares(tmp_path: Path) -> None:
    found = {
        CommittedSelections(tmp_path / name, None, None)
        .take(instruction(opening=opened()))
        .commitment
        for name in ("one", "other")
    }
    assert len(found) == 2


def test_an_incomplete_line_is_overwritten(tmp_path: Path) -> None:
    CommittedSelections(tmp_path, None, None).take(instruction(opening=opened()))
    [file] = (tmp_path / "selections").glob("*.jsonl")
    whole = file.read_bytes()
    file.write_bytes(whole + b'{"attend')
    restarted = CommittedSelections(tmp_path, None, None)
    commitment = restarted.take(instruction(opening=opened())).commitment
    restarted.take(instruction(attendees=attendees(commitment)))
    assert file.read_bytes().startswith(whole)
    assert len(file.read_bytes().splitlines()) == 2


def test_a_host_that_knows_nothing_of_a_run_lets_it_train(tmp_path: Path) -> None:
    training = rpc.Instruction(client_id=CLIENT, run_id=RUN, round=1, train=rpc.Train())
    CommittedSelections(tmp_path, None, None).check(training)
    assert list(tmp_path.iterdir()) == []


def test_an_owner_who_requires_it_trains_by_verified_selections_only() -> None:
    policy, work = DisclosurePolicy(verified_selection=True), rpc.Train(training_json="{}")
    with pytest.raises(DisclosureRefusedError, match="`verified_selection` is true"):
        permitted_weighting(policy, CLIENT, work)
    work.selection.outcome_sha256 = "33" * 32  # committed to, but not recomputed by hosts
    with pytest.raises(DisclosureRefusedError, match="`verified_selection` is true"):
        permitted_weighting(policy, CLIENT, work)
    work.selection.hosts_verify = True
    permitted_weighting(policy, CLIENT, work)
    permitted_weighting(DisclosurePolicy(), CLIENT, rpc.Train(training_json="{}"))
