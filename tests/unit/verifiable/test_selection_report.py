"""A host's report of the selections whose documents it has stored."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from potluck.common.errors import StorageError
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.verifiable.chain import Chain
from potluck.verifiable.documents import Attendees, Opening, Outcome, Speaker
from potluck.verifiable.host.committed_selections import CommittedSelections
from potluck.verifiable.host.selection_report import SelectionReport

CLIENTS = ("client-0", "client-1", "client-2")


class Coordinator:
    """Commits to selections with the run's seed, and sends the documents to one host."""

    def __init__(self, host: Path, run: str = "run-1") -> None:
        self.chain = Chain.begin(run)
        self._host = CommittedSelections(host, None, None, ["client-0"])

    def open(self, round_number: int, attempt: int = 1, *, send: bool = True) -> None:
        opening = Opening(
            previous=self.chain.tip,
            run=self.chain.run,
            rounds=9,
            round=round_number,
            attempt=attempt,
            selector="fedentopt",
            count=2,
            inputs_sha256="22" * 32,
            seed=7,
        ).encode()
        self._send(self.chain.opened(opening), send=send, opening=opening)

    def select(self, round_number: int, attempt: int = 1, *, send: bool = True) -> None:
        self.open(round_number, attempt, send=send)
        attendees = Attendees(
            previous=self.chain.tip, available=CLIENTS, speakers=(Speaker(client="client-0"),)
        ).encode()
        self._send(self.chain.attended(attendees), send=send, attendees=attendees)
        outcome = Outcome(previous=self.chain.tip, cohort=("client-2", "client-0")).encode()
        self._send(self.chain.ended(outcome), send=send, outcome=outcome)

    def train(self, round_number: int) -> None:
        """Instruct client-0 to train by the last outcome."""
        instruction = rpc.Instruction(
            client_id="client-0", run_id=self.chain.run, round=round_number, train=rpc.Train()
        )
        instruction.train.selection.outcome_sha256 = self.chain.outcome_sha256
        self._host.check(instruction)

    def _send(self, chain: Chain, *, send: bool, **document: Any) -> None:
        self.chain = chain
        assert chain.opening is not None
        instruction = rpc.Instruction(
            client_id="client-0",
            run_id=chain.run,
            round=chain.opening.round,
            selection=rpc.SelectionDocument(**document),
        )
        if send:
            self._host.take(instruction)


def lines(host: Path, run: str | None = None) -> list[str]:
    return list(SelectionReport(host, ["client-0"], run).lines())


def test_each_attempt_has_a_line_with_its_last_digest(tmp_path: Path) -> None:
    coordinator, tips = Coordinator(tmp_path), list[str]()
    coordinator.open(1)
    tips.append(coordinator.chain.tip)
    coordinator.select(1, 2)
    coordinator.train(1)
    tips.append(coordinator.chain.tip)
    coordinator.select(2, send=False)
    coordinator.select(3)
    tips.append(coordinator.chain.tip)
    cohort = "2 of 3 clients, on this host: client-0, instructed to train:"
    how, gap = "recorded, not recomputed", "earlier documents are missing"
    assert lines(tmp_path) == [
        f"run run-1, round {attempt}"
        for attempt in (
            f"1 of 9, attempt 1: no cohort; no outcome was received; opening {tips[0]}",
            f"1 of 9, attempt 2: {cohort} client-0; {how}; outcome {tips[1]}",
            f"3 of 9, attempt 1: {cohort} none; {how}; {gap}; outcome {tips[2]}",
        )
    ]


def test_a_host_that_joins_later_has_a_gap(tmp_path: Path) -> None:
    coordinator = Coordinator(tmp_path)
    coordinator.select(1, send=False)
    coordinator.select(2)
    coordinator.select(3)
    [run] = json.loads(SelectionReport(tmp_path, CLIENTS).values())["runs"]
    assert [(each["round"], each["gap"]) for each in run["selections"]] == [(2, True), (3, False)]
    assert run["selections"][0]["own"] == ["client-2", "client-0"]


def test_runs_are_listed_by_the_beginning_of_their_ids(tmp_path: Path) -> None:
    assert lines(tmp_path) == [
        f"no selections: {tmp_path / 'selections'} has no documents of such a run"
    ]
    for run in ("run-b", "run-a", "other"):
        Coordinator(tmp_path, run).select(1)
    named = [line.split(",")[0] for line in lines(tmp_path)]
    assert named == ["run other", "run run-a", "run run-b"]
    assert [line.split(",")[0] for line in lines(tmp_path, "run-")] == ["run run-a", "run run-b"]


def lost(found: list[str], number: int) -> list[str]:
    return found[: number - 1] + found[number:]


def changed(found: list[str], number: int) -> list[str]:
    line = found[number - 1].replace("client-2", "client-1")
    return [*found[: number - 1], line, *found[number:]]


@pytest.mark.parametrize(
    ("edit", "number", "why"),
    [
        pytest.param(lost, 1, "line 1 .* the line has no opening", id="first opening lost"),
        pytest.param(lost, 2, "line 2 .* has no attendees yet", id="attendees lost"),
        pytest.param(changed, 2, "line 2 .* has a client twice", id="attendees changed"),
        pytest.param(changed, 3, "", id="last outcome changed"),
    ],
)
def test_a_changed_file_breaks_the_chain_except_at_its_end(
    tmp_path: Path, edit: Callable[[list[str], int], list[str]], number: int, why: str
) -> None:
    """A changed last document shows only in its digest, which the coordinator has, too."""
    Coordinator(tmp_path).select(1)
    [path] = (tmp_path / "selections").glob("*.jsonl")
    before = lines(tmp_path)
    path.write_text("".join(edit(path.read_text().splitlines(keepends=True), number)))
    if why:
        with pytest.raises(StorageError, match=why):
            lines(tmp_path)
        Coordinator(tmp_path, "run-2").select(1)
        if number > 1:  # another run can still be listed
            assert len(lines(tmp_path, "run-2")) == 1
    else:
        assert lines(tmp_path) != before
