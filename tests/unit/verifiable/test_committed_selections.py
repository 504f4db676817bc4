"""A host's record of selections, which survives restarts."""

from __future__ import annotations

from pathlib import Path

import pytest

from potluck.client.disclosure.disclosure_policy import DisclosurePolicy
from potluck.client.handlers.training_handler import permitted_weighting
from potluck.common.errors import DisclosureRefusedError
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.verifiable.documents import (
    COORDINATOR,
    Attendees,
    BrokenSelectionError,
    Opening,
    Speaker,
    commitment_to,
    genesis,
)
from potluck.verifiable.host.committed_selections import CommittedSelections

RUN, CLIENT, SHARE = "../run", "client-0", "11" * 32


def instruction(**document: bytes) -> rpc.Instruction:
    selection = rpc.SelectionDocument(**document)
    return rpc.Instruction(client_id=CLIENT, run_id=RUN, round=1, selection=selection)


def opened() -> bytes:
    previous = genesis(RUN)
    return Opening(
        previous=previous,
        run=RUN,
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
