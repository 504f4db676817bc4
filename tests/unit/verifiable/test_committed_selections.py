"""A host's record of selections, which survives restarts."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from support.memberships import signed, write_root
from support.secure_sums import member_key, member_record

from potluck.client.disclosure.disclosure_policy import DisclosurePolicy
from potluck.client.handlers.training_handler import permitted_weighting
from potluck.common.errors import DisclosureRefusedError
from potluck.common.net.key_files import KEY_MODE, private_pem, write_file
from potluck.common.net.membership_in_force import MembershipInForce
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.verifiable.chain import Chain
from potluck.verifiable.documents import (
    COORDINATOR,
    Attendees,
    BrokenSelectionError,
    Opening,
    Outcome,
    Speaker,
    commitment_to,
    genesis,
    receipt,
)
from potluck.verifiable.host.committed_selections import MOST_UNTRAINED, CommittedSelections

RUN, CLIENT, SHARE = "../run", "client-0", "11" * 32


def instruction(client: str = CLIENT, **document: Any) -> rpc.Instruction:
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
        CommittedSelections(tmp_path, None, None, [CLIENT])
        .take(instruction(opening=opened()))
        .commitment
    )
    restarted = CommittedSelections(tmp_path, None, None, [CLIENT])
    assert restarted.take(instruction(opening=opened())).commitment == commitment
    share = restarted.take(instruction(attendees=attendees(commitment))).share
    assert commitment_to(share, Opening.digest_of(opened()), CLIENT) == commitment
    again = CommittedSelections(tmp_path, None, None, [CLIENT])
    assert again.take(instruction(attendees=attendees(commitment))).share == share
    with pytest.raises(BrokenSelectionError, match="one list only"):
        again.take(instruction(attendees=attendees(commitment, "client-1")))
    assert [each for each in tmp_path.iterdir() if each.name != "selections"] == []


@pytest.mark.parametrize("restarts", [False, True])
def test_a_host_makes_one_commitment_only_to_each_seed(tmp_path: Path, *, restarts: bool) -> None:
    """A coordinator with several shares of a host could leave some out until it likes the seed."""
    host = CommittedSelections(tmp_path, None, None, [CLIENT])
    commitment = host.take(instruction(opening=opened())).commitment
    if restarts:
        host = CommittedSelections(tmp_path, None, None, [CLIENT])
    for document in (
        {"opening": opened()},
        {"attendees": attendees(commitment, "client-1")},
    ):
        with pytest.raises(BrokenSelectionError, match="'client-0' already speaks for this host"):
            host.take(instruction("client-1", **document))
    assert host.take(instruction(attendees=attendees(commitment, "client-1"))).share


def next_opening(chain: Chain, round_number: int) -> bytes:
    return Opening(
        previous=chain.tip,
        run=RUN,
        rounds=99,
        round=round_number,
        attempt=1,
        selector="fedentopt",
        count=1,
        inputs_sha256="22" * 32,
        seed=7,
    ).encode()


def in_round(number: int, **document: Any) -> rpc.Instruction:
    found = instruction(**document)
    found.round = number
    return found


def selected(
    host: CommittedSelections, chain: Chain, round_number: int, cohort: str = CLIENT
) -> Chain:
    """Send a host the documents of one round; return the chain. cohort: the selected client."""
    opening = next_opening(chain, round_number)
    host.take(in_round(round_number, opening=opening))
    chain = chain.opened(opening)
    listed = Attendees(
        previous=chain.tip, available=(CLIENT, "client-9"), speakers=(Speaker(client=CLIENT),)
    ).encode()
    host.take(in_round(round_number, attendees=listed))
    chain = chain.attended(listed)
    outcome = Outcome(previous=chain.tip, cohort=(cohort,)).encode()
    host.take(in_round(round_number, outcome=outcome))
    return chain.ended(outcome)


def training(chain: Chain, round_number: int, model: str = "a") -> rpc.Instruction:
    """Return an instruction to train by the chain's last outcome."""
    found = rpc.Instruction(
        id=f"run/{round_number}.1/{CLIENT}", client_id=CLIENT, run_id=RUN, round=round_number
    )
    found.train.model.blake3 = model
    found.train.selection.outcome_sha256 = chain.outcome_sha256
    return found


def test_a_client_has_one_training_by_a_selection(tmp_path: Path) -> None:
    """Otherwise, a coordinator that likes a cohort could train it for many rounds."""
    host = CommittedSelections(tmp_path, None, None, [CLIENT])
    chain = selected(host, Chain.begin(RUN), 1)
    host.check(training(chain, 1))
    other_id = training(chain, 1)
    other_id.id += "/again"
    for another in (training(chain, 1, model="b"), other_id):
        for found in (host, CommittedSelections(tmp_path, None, None, [CLIENT])):
            with pytest.raises(BrokenSelectionError, match="already has another training by this"):
                found.check(another)
            found.check(training(chain, 1))  # again after a lost connection
    asked = training(chain, 1)
    asked.train.before_upload.kind = "soft-label"
    host.check(asked)
    chain = selected(host, chain, 2)
    host.check(training(chain, 2, model="b"))


@pytest.mark.parametrize("restarts", [False, True])
def test_a_host_leaves_a_run_that_selects_its_clients_and_does_not_train_them(
    tmp_path: Path, *, restarts: bool
) -> None:
    """A coordinator could select until it likes the cohort, and train only then."""
    host = CommittedSelections(tmp_path, None, None, [CLIENT])
    chain = selected(host, Chain.begin(RUN), 1)
    for number in range(2, MOST_UNTRAINED + 1):
        chain = selected(host, chain, number)
    host.check(training(chain, MOST_UNTRAINED))
    for number in range(MOST_UNTRAINED + 1, 3 * MOST_UNTRAINED + 1):
        if restarts:
            host = CommittedSelections(tmp_path, None, None, [CLIENT])
        if number % 2:  # selections of other clients say nothing about this host's
            chain = selected(host, chain, number, cohort="client-9")
        else:
            chain = selected(host, chain, number)
    again = next_opening(chain, 3 * MOST_UNTRAINED + 1)
    with pytest.raises(BrokenSelectionError, match="the last 10 cohorts with clients of this host"):
        host.take(in_round(3 * MOST_UNTRAINED + 1, opening=again))


def test_a_host_with_a_federation_root_needs_the_member_list(tmp_path: Path) -> None:
    """Without the list, the coordinator could invent speakers and clients."""
    root = write_root(tmp_path)
    in_force = MembershipInForce(root, federation="f", file=None, state_directory=tmp_path)
    host = CommittedSelections(tmp_path, None, in_force, [CLIENT])
    found = host.take(instruction(opening=opened()))
    with pytest.raises(BrokenSelectionError, match="no member list has arrived"):
        host.take(instruction(attendees=attendees(found.commitment)))


def missed_attempt() -> tuple[bytes, bytes, bytes]:
    """Return the documents of an attempt in which another host took part."""
    chain, share = Chain.begin(RUN).opened(opened()), "44" * 32
    other = Speaker(
        client="client-9", commitment=commitment_to(share, chain.opening_sha256, "client-9")
    )
    listed = Attendees(
        previous=chain.opening_sha256, available=("client-9", CLIENT), speakers=(other,)
    )
    chain = chain.attended(listed.encode())
    shares = {"client-9": share}
    outcome = Outcome(
        previous=chain.attendees_sha256,
        cohort=chain.recomputed(chain.seed(SHARE, shares)),
        share=SHARE,
        shares=shares,
    )
    return opened(), listed.encode(), outcome.encode()


def test_missed_documents_are_stored_but_reveal_nothing_and_allow_no_training(
    tmp_path: Path,
) -> None:
    """The host has no share in the seed of a missed attempt."""
    opening, listed, outcome = missed_attempt()
    host = CommittedSelections(tmp_path, None, None, [CLIENT])
    with pytest.raises(BrokenSelectionError, match="the selection has no opening yet"):
        host.take(instruction(attendees=listed, missed=True))
    for _ in range(2):  # again after a restart of the coordinator
        for taken in (
            instruction(opening=opening, missed=True),
            instruction(attendees=listed, missed=True),
            instruction(outcome=outcome, missed=True),
        ):
            assert host.take(taken) == rpc.SelectionReceipt()
        host = CommittedSelections(tmp_path, None, None, [CLIENT])
    late = rpc.Instruction(client_id=CLIENT, run_id=RUN, round=1, train=rpc.Train())
    late.train.selection.outcome_sha256 = Outcome.digest_of(outcome)
    with pytest.raises(BrokenSelectionError, match="is not the last one that this host has rec"):
        host.check(late)
    [file] = (tmp_path / "selections").glob("*.jsonl")
    assert len(file.read_text().splitlines()) == 3


def test_a_missed_document_of_another_chain_is_refused(tmp_path: Path) -> None:
    host = CommittedSelections(tmp_path, None, None, [CLIENT])
    later = Opening.parse(opened()).model_copy(update={"previous": "55" * 32})
    with pytest.raises(BrokenSelectionError, match="must continue this host's chain"):
        host.take(instruction(opening=later.encode(), missed=True))


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
    host = CommittedSelections(tmp_path, key, in_force, [CLIENT])
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
        CommittedSelections(tmp_path / name, None, None, [CLIENT])
        .take(instruction(opening=opened()))
        .commitment
        for name in ("one", "other")
    }
    assert len(found) == 2


def test_an_incomplete_line_is_overwritten(tmp_path: Path) -> None:
    CommittedSelections(tmp_path, None, None, [CLIENT]).take(instruction(opening=opened()))
    [file] = (tmp_path / "selections").glob("*.jsonl")
    whole = file.read_bytes()
    file.write_bytes(whole + b'{"attend')
    restarted = CommittedSelections(tmp_path, None, None, [CLIENT])
    commitment = restarted.take(instruction(opening=opened())).commitment
    restarted.take(instruction(attendees=attendees(commitment)))
    assert file.read_bytes().startswith(whole)
    assert len(file.read_bytes().splitlines()) == 2


def test_a_host_that_knows_nothing_of_a_run_lets_it_train(tmp_path: Path) -> None:
    unknown = rpc.Instruction(client_id=CLIENT, run_id=RUN, round=1, train=rpc.Train())
    CommittedSelections(tmp_path, None, None, [CLIENT]).check(unknown)
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
