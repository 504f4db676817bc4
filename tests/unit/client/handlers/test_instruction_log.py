from __future__ import annotations

import pytest

from potluck.client.handlers.instruction_log import (
    InstructionLog,
    InstructionStage,
    Reception,
    digest_of_work,
)
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1 import transfer_pb2


def train(
    name: str, *, client: str = "client-0", run: str = "run", round_: int = 1
) -> rpc.Instruction:
    return rpc.Instruction(id=name, client_id=client, run_id=run, round=round_, train=rpc.Train())


def failure(name: str) -> rpc.Answer:
    return rpc.Answer(instruction_id=name, failure=rpc.Failure(reason="TRAINING_FAILED"))


def test_instruction_received_twice_is_started_once() -> None:
    ledger = InstructionLog()
    assert ledger.receive(train("a")) is Reception.BEGIN
    assert ledger.receive(train("a")) is Reception.GOES_ON
    assert ledger.receive(train("b")) is Reception.BEGIN


def test_finished_instruction_received_again_repeats_its_answer() -> None:
    ledger = InstructionLog()
    ledger.receive(train("a"))
    assert ledger.finish("a", failure("a"))
    assert ledger.receive(train("a")) is Reception.REPEAT
    assert ledger.entry("a").answer == failure("a")


def test_instruction_that_failed_for_a_missing_file_starts_again() -> None:
    """A restored coordinator does not have the file until it has repeated a round."""
    ledger, answer = InstructionLog(), failure("a")
    answer.failure.reason = "NOT_FOUND"
    ledger.receive(train("a"))
    assert ledger.finish("a", answer)
    assert ledger.receive(train("a")) is Reception.BEGIN
    assert ledger.entry("a").answer is None
    assert ledger.receive(train("a")) is Reception.GOES_ON


@pytest.mark.parametrize(
    ("reached", "stage"),
    [
        (InstructionStage.QUEUED, rpc.Progress.STAGE_QUEUED),
        (InstructionStage.DOWNLOADING, rpc.Progress.STAGE_DOWNLOADING),
        (InstructionStage.COMPUTING, rpc.Progress.STAGE_COMPUTING),
        (InstructionStage.UPLOADING, rpc.Progress.STAGE_UPLOADING),
    ],
)
def test_heartbeats_report_unfinished_instructions(
    reached: InstructionStage, stage: rpc.Progress.Stage.ValueType
) -> None:
    ledger = InstructionLog()
    ledger.receive(train("done"))
    ledger.finish("done", None)
    ledger.receive(train("a"))
    ledger.move("a", reached)
    ledger.entry("a").fraction = 0.25
    assert ledger.progress() == [rpc.Progress(instruction_id="a", stage=stage, fraction=0.25)]


def test_abandoned_instruction_is_stopped_without_an_answer() -> None:
    ledger = InstructionLog()
    for name in ("under way", "finished"):
        ledger.receive(train(name))
    ledger.finish("finished", failure("finished"))
    assert ledger.abandon(["under way", "finished"]) == ["under way"]
    assert ledger.progress() == []
    for name in ("under way", "finished"):
        assert not ledger.move(name, InstructionStage.UPLOADING)
        assert not ledger.finish(name, failure(name))
        assert ledger.entry(name).answer is None


def test_abandoned_or_settled_instruction_restarts_when_received_again() -> None:
    ledger = InstructionLog()
    for name in ("abandoned", "settled"):
        ledger.receive(train(name))
    ledger.abandon(["abandoned"])
    ledger.settle(run_id="run", client_id="client-0", round=1)
    for name in ("abandoned", "settled"):
        assert ledger.receive(train(name)) is Reception.BEGIN
        assert ledger.receive(train(name)) is Reception.GOES_ON
        assert ledger.finish(name, None)
        assert ledger.receive(train(name)) is Reception.REPEAT


def test_instruction_abandoned_before_it_arrives_is_refused_once() -> None:
    ledger = InstructionLog()
    assert ledger.abandon(["a"]) == []
    assert ledger.abandon(["a"]) == []
    assert ledger.receive(train("a")) is Reception.REFUSE
    assert ledger.under_way() == []
    assert ledger.receive(train("a")) is Reception.BEGIN


def test_restarted_coordinator_clears_instructions_abandoned_before_arrival() -> None:
    ledger = InstructionLog()
    ledger.receive(train("done"))
    ledger.finish("done", failure("done"))
    ledger.abandon(["a"])
    ledger.coordinator_is("another")
    assert ledger.receive(train("a")) is Reception.BEGIN
    assert ledger.receive(train("done")) is Reception.REPEAT


def with_model(
    blake3: str, *, renditions: int = 1, seconds: int = 60, included: str = ""
) -> rpc.Instruction:
    def reference(name: str) -> transfer_pb2.ModelReference:
        files = [transfer_pb2.Rendition(blake3=f"{name}{n}") for n in range(renditions)]
        return transfer_pb2.ModelReference(blake3=name, size=4, renditions=files)

    instruction = train("a")
    instruction.train.model.CopyFrom(reference(blake3))
    instruction.train.auxiliary.shared.CopyFrom(reference("shared"))
    instruction.train.kept.included_update_id = included
    instruction.time_left.FromSeconds(seconds)
    return instruction


def test_instruction_with_a_known_id_and_different_work_starts_again() -> None:
    """A coordinator restored from a backup can reach the same round with different work."""
    ledger = InstructionLog()
    assert ledger.receive(with_model("one")) is Reception.BEGIN
    assert ledger.receive(with_model("one", renditions=2, seconds=5)) is Reception.GOES_ON
    assert ledger.receive(with_model("two")) is Reception.BEGIN
    ledger.finish("a", None)
    assert ledger.receive(with_model("two")) is Reception.REPEAT
    assert ledger.receive(with_model("two", included="run/1.1/client-0")) is Reception.BEGIN


@pytest.mark.parametrize("kind", ["evaluate", "disclose", "question"])
def test_work_digest_differs_only_for_different_work(kind: str) -> None:
    def asking(blake3: str, *renditions: str) -> rpc.Instruction:
        instruction = rpc.Instruction(id="a", client_id="client-0", run_id="run", round=1)
        model = getattr(instruction, kind).model
        model.blake3 = blake3
        model.renditions.extend(transfer_pb2.Rendition(blake3=name) for name in renditions)
        return instruction

    assert digest_of_work(asking("one")) == digest_of_work(asking("one", "a", "b"))
    assert digest_of_work(asking("one")) != digest_of_work(asking("two"))


def test_settled_round_stops_only_trainings_of_that_client_run_and_round() -> None:
    ledger = InstructionLog()
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


def test_instruction_log_forgets_only_old_finished_instructions() -> None:
    ledger = InstructionLog(remembered=3)
    for name in "abcdef":
        ledger.receive(train(name))
    assert len(ledger.under_way()) == 6
    for name in "abcdef":
        ledger.finish(name, None)
    assert ledger.receive(train("f")) is Reception.REPEAT
    assert ledger.receive(train("a")) is Reception.BEGIN
