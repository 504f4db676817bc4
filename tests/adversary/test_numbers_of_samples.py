"""Seconds, steps and progress that would reveal the number of samples."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from adversary.conftest import CLIENTS, attacked
from adversary.proxy import Script
from support.sum_federation import Members

from potluck.common.errors import ConfigurationError
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1 import transfer_pb2
from potluck.server.store import RunState

EQUAL = f"""
rounds = 1
clients_per_round = {CLIENTS}
expected_clients = {CLIENTS}
weighting = "equal"
task = {{name = "digits", clients = {CLIENTS}}}
training = {{steps = 1}}
round = {{attempts = 1, quorum = 0.01}}
"""


class Paced(Script):
    """Sets the simulated duration of a training to one second per sample."""

    def to_host(self, host: str, message: rpc.AttendResponse) -> Iterable[rpc.AttendResponse]:
        if message.instruction.WhichOneof("work") == "train":
            message.instruction.train.pace = 1.0
        return [message]


async def test_undisclosed_sample_counts_are_not_revealed_by_simulated_seconds(
    members: Members, tmp_path: Path
) -> None:
    async with attacked(members, tmp_path, disclosure={"weighting": "equal"}) as scene:
        scene.liar.script = Paced()
        row = await scene.federation.finished(EQUAL)
        failures = [message.answer.failure.reason for _, message in scene.liar.said]
    assert row.state is RunState.FAILED
    assert failures.count("DISCLOSURE_REFUSED") == CLIENTS


SAMPLES_UNTOLD = {"weighting": "equal"}
UNEVEN = f"""
rounds = 1
clients_per_round = {CLIENTS}
expected_clients = {CLIENTS}
weighting = "equal"
task = {{name = "digits", clients = {CLIENTS}, alpha = 0.1}}
training = {{epochs = 20, batch_size = 4}}
"""


class Headers(Script):
    """Records the headers with which hosts announce their updates."""

    def __init__(self) -> None:
        self.reports: dict[str, transfer_pb2.TrainingReport] = {}

    def upload(
        self, host: str, frame: rpc.SubmitUpdateRequest
    ) -> Iterable[rpc.SubmitUpdateRequest]:
        if frame.frame.HasField("header"):
            self.reports[host] = frame.frame.header.report
        return [frame]


async def test_values_sent_with_updates_are_independent_of_the_sample_count(
    members: Members, tmp_path: Path
) -> None:
    """Steps, seconds, the normaliser and progress do not depend on the number of samples."""
    async with attacked(members, tmp_path, disclosure=SAMPLES_UNTOLD) as scene:
        scene.liar.script = headers = Headers()
        row = await scene.federation.finished(UNEVEN)
        progress = [
            each.fraction for _, said in scene.liar.said for each in said.heartbeat.progress
        ]
    assert row.state is RunState.FINISHED, row.reason
    assert len(headers.reports) == CLIENTS
    told = {
        (each.samples, each.steps, each.seconds, each.normalizer)
        for each in headers.reports.values()
    }
    [(samples, steps, seconds, _)] = told
    assert (samples, steps, seconds) == (1, 20, 0.0)
    assert not any(progress)


@pytest.mark.parametrize(
    ("strategy", "why"),
    [
        pytest.param("fednova", "normalises by the clients' numbers of steps", id="fednova"),
        pytest.param("scaffold", "discloses the number of steps", id="scaffold"),
    ],
)
async def test_strategies_that_need_step_counts_are_refused_by_hosts(
    members: Members, tmp_path: Path, strategy: str, why: str
) -> None:
    async with attacked(members, tmp_path, disclosure=SAMPLES_UNTOLD) as scene:
        run_file = f'{UNEVEN}strategy = {{name = "{strategy}"}}\n'
        try:
            reason = (await scene.federation.finished(run_file)).reason
        except ConfigurationError as error:
            reason = error.message
    assert why in reason


async def test_scaffold_runs_with_equal_numbers_of_steps(members: Members, tmp_path: Path) -> None:
    async with attacked(members, tmp_path, disclosure=SAMPLES_UNTOLD) as scene:
        row = await scene.federation.finished(EQUAL + 'strategy = {name = "scaffold"}\n')
    assert row.state is RunState.FINISHED, row.reason
