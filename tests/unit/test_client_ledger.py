from __future__ import annotations

import pytest

from potluck.client.ledger import Ledger, Reception, Standing
from potluck.rpc.v1 import coordinator_pb2 as rpc


def train(
    name: str, *, client: str = "client-0", run: str = "run", round_: int = 1
) -> rpc.Instruction:
    return rpc.Instruction(id=name, client_id=client, run_id=run, round=round_, train=rpc.Train())


def failure(name: str) -> rpc.Answer:
    return rpc.Answer(instruction_id=name, failure=rpc.Failure(reason="TRAINING_FAILED"))


def test_an_id_is_begun_once() -> None:
    ledger = Ledger()
    assert ledger.receive(train("a")) is Reception.BEGIN
    assert ledger.receive(train("a")) is Reception.GOES_ON
    assert ledger.receive(train("b")) is Reception.BEGIN


def test_what_is_finished_is_answered_again() -> None:
    ledger = Ledger()
    ledger.receive(train("a"))
    assert ledger.finish("a", failure("a"))
    assert ledger.receive(train("a")) is Reception.REPEAT
    assert ledger.entry("a").answer == failure("a")


@pytest.mark.parametrize(
    ("standing", "stage"),
    [
        (Standing.QUEUED, rpc.Progress.STAGE_QUEUED),
        (Standing.DOWNLOADING, rpc.Progress.STAGE_DOWNLOADING),
        (Standing.COMPUTING, rpc.Progress.STAGE_COMPUTING),
        (Standing.UPLOADING, rpc.Progress.STAGE_UPLOADING),
    ],
)
def test_heartbeats_tell_of_work_under_way(
    standing: Standing, stage: rpc.Progress.Stage.ValueType
) -> None:
    ledger = Ledger()
    ledger.receive(train("done"))
    ledger.finish("done", None)
    ledger.receive(train("a"))
    ledger.move("a", standing)
    ledger.entry("a").fraction = 0.25
    assert ledger.progress() == [rpc.Progress(instruction_id="a", stage=stage, fraction=0.25)]


def test_abandoned_work_stops_and_stays_dropped() -> None:
    ledger = Ledger()
    for name in ("under way", "finished"):
        ledger.receive(train(name))
    ledger.finish("finished", failure("finished"))
    assert ledger.abandon(["under way", "finished"]) == ["under way"]
    assert ledger.progress() == []
    for name in ("under way", "finished"):
        assert ledger.receive(train(name)) is Reception.IGNORE
        assert not ledger.move(name, Standing.UPLOADING)
        assert not ledger.finish(name, failure(name))
        assert ledger.entry(name).answer is None


def test_an_abandoned_instruction_that_comes_late_is_not_begun() -> None:
    ledger = Ledger()
    assert ledger.abandon(["a"]) == []
    assert ledger.receive(train("a")) is Reception.IGNORE


def test_a_settled_round_ends_that_clients_trainings_only() -> None:
    ledger = Ledger()
    others = [
        train("other client", client="client-1"),
        train("other run", run="other"),
        train("next round", round_=3),
        rpc.Instruction(
            id="evaluation", client_id="client-0", run_id="run", round=2, evaluate=rpc.Evaluate()
        ),
    ]
    for instruction in (train("earlier"), train("settled", round_=2), *others):
        ledger.receive(instruction)
    assert ledger.settle(run_id="run", client_id="client-0", round=2) == ["earlier", "settled"]
    assert [entry.id for entry in ledger.under_way()] == [other.id for other in others]


def test_old_finished_ids_are_forgotten_but_never_work_under_way() -> None:
    ledger = Ledger(remembered=3)
    for name in "abcdef":
        ledger.receive(train(name))
    assert len(ledger.under_way()) == 6
    for name in "abcdef":
        ledger.finish(name, None)
    assert ledger.receive(train("f")) is Reception.REPEAT
    assert ledger.receive(train("a")) is Reception.BEGIN
