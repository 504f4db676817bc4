"""Grouping of trainings, and how far the coordinator can influence it."""

from __future__ import annotations

from typing import Any

import pytest

from potluck.client.base.worker import Worker
from potluck.client.handlers.instruction_log import InstructionLog
from potluck.client.handlers.training_groups import (
    TrainingGroups,
    check_companions,
    clients_of,
    part_of,
    reason_alone,
)
from potluck.common.errors import ProtocolError
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1.transfer_pb2 import ENCODING_MASKED_UINT32 as MASKED

BATCHED = '{"batched": true}'


def instruction(*companions: str, client: str = "a", **work: Any) -> rpc.Instruction:
    work = {"training_json": BATCHED, **work}
    return rpc.Instruction(
        id=f"run/1.1/{client}",
        client_id=client,
        train=rpc.Train(companions=[f"run/1.1/{each}" for each in companions], **work),
    )


@pytest.mark.parametrize(
    ("work", "reason"),
    [
        ({}, ""),
        ({"encoding": MASKED}, "masked"),
        ({"auxiliary": rpc.Auxiliary()}, "corrects"),
        ({"quotas": [1.0]}, "limited"),
        ({"personal": rpc.PersonalTraining()}, "own"),
        ({"part": 0}, "part"),
        ({"reports": ["utility"]}, "reports"),
    ],
)
async def test_training_with_individual_work_is_not_grouped(
    work: dict[str, Any], reason: str
) -> None:
    groups = TrainingGroups(Worker(), InstructionLog())
    told = instruction("a", "b", **work)
    assert reason in reason_alone(told.train)
    assert groups.wanted(told) is not bool(reason)


async def test_training_is_grouped_only_if_the_instruction_requests_it() -> None:
    groups = TrainingGroups(Worker(), InstructionLog())
    assert not groups.wanted(instruction())
    assert not groups.wanted(instruction("a", "b", training_json='{"batched": false}'))
    assert not groups.wanted(instruction("a", "b", training_json="{}"))


def test_companions_are_mapped_to_the_clients_of_the_attempt() -> None:
    told = instruction("c", "a", "b")
    check_companions(told)
    assert clients_of(told, told.train.companions[:2]) == ["c", "a"]


def test_group_is_split_into_one_part_per_worker() -> None:
    companions = [f"run/1.1/{each}" for each in "abcde"]
    parts = {part_of(companions, each, 2) for each in companions}
    assert parts == {tuple(companions[:2]), tuple(companions[2:])}
    assert {part_of(companions, each, 9) for each in companions} == {(each,) for each in companions}


async def test_client_with_its_own_worker_is_trained_alone() -> None:
    log, told = InstructionLog(), instruction("a", "b")
    workers: list[Worker[Any]] = [Worker(*[list[int]] * count) for count in (1, 2)]
    one, two = (TrainingGroups(each, log) for each in workers)
    assert one.wanted(told)
    assert not two.wanted(told)
    for worker in workers:
        worker.close()


@pytest.mark.parametrize(
    "companions",
    [
        ["run/1.1/b", "run/1.1/c"],
        ["run/1.1/a", "run/1.1/a"],
        ["run/1.1/a", "run/1.2/b"],
        ["run/1.1/a", *(f"run/1.1/{number}" for number in range(5000))],
    ],
    ids=["not itself", "twice", "another attempt", "too many"],
)
def test_invalid_companions_are_refused(companions: list[str]) -> None:
    told = instruction()
    told.train.companions.extend(companions)
    with pytest.raises(ProtocolError, match="invalid list of trainings"):
        check_companions(told)
