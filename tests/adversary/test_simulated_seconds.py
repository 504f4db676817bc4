"""Simulated seconds that would tell the number of samples."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from adversary.conftest import CLIENTS, attacked
from adversary.proxy import Script
from support.sum_federation import Members

from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.server.store import RunState

EQUAL = f"""
rounds = 1
count = {CLIENTS}
roster = {CLIENTS}
weighting = "equal"
task = {{name = "digits", clients = {CLIENTS}}}
training = {{steps = 1}}
round = {{attempts = 1}}
"""


class Paced(Script):
    """A second for each sample is what a training is said to take."""

    def to_host(self, host: str, message: rpc.AttendResponse) -> Iterable[rpc.AttendResponse]:
        if message.instruction.WhichOneof("work") == "train":
            message.instruction.train.pace = 1.0
        return [message]


async def test_samples_that_are_not_told_are_not_told_as_seconds(
    members: Members, tmp_path: Path
) -> None:
    async with attacked(members, tmp_path, disclosure={"weighting": "equal"}) as scene:
        scene.liar.script = Paced()
        row = await scene.federation.finished(EQUAL)
        failures = [message.answer.failure.reason for _, message in scene.liar.said]
    assert row.state is RunState.FAILED
    assert failures.count("DISCLOSURE_REFUSED") == CLIENTS
