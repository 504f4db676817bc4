"""The same training twice, over other clients: the difference of the sums is whoever was left out.

Before inputs were remembered by their model, a blank in the settings' text, or an option that
changes nothing, made a training another one.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from adversary.conftest import CLIENTS, Scene, attacked
from adversary.proxy import Script
from support.sum_federation import Members

from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.server.store import RunRow, RunState

TRAINING = "steps = 5"
TASK = f'name = "digits", clients = {CLIENTS}'


async def trained(
    scene: Scene, count: int, training: str = TRAINING, task: str = TASK, spaced: bool = False
) -> RunRow:
    """A run of one round that begins from the same model, with so many of the clients."""
    scene.liar.script = Spaced() if spaced else Script()
    return await scene.federation.finished(
        f"""
        secure_aggregation = true
        rounds = 1
        count = {count}
        roster = {CLIENTS}
        task = {{{task}}}
        training = {{{training}}}
        masking = {{stage_seconds = 20.0}}
        round = {{deadline_seconds = 60.0, attempts = 1}}
        """
    )


class Spaced(Script):
    """Settings come with blanks that mean nothing."""

    def to_host(self, host: str, message: rpc.AttendResponse) -> Iterable[rpc.AttendResponse]:
        if message.instruction.WhichOneof("work") == "train":
            work = message.instruction.train
            work.training_json = work.training_json.replace(",", " ,\n")
        return [message]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="all as before"),
        pytest.param({"spaced": True}, id="a blank"),
        pytest.param({"task": f"{TASK}, alpha = 0.5"}, id="an option"),
        pytest.param({"training": "steps = 5, learning_rate = 0.0101"}, id="a learning rate"),
    ],
)
async def test_updates_of_one_model_are_summed_over_one_set(
    scene: Scene, changes: dict[str, str | bool]
) -> None:
    first = await trained(scene, CLIENTS)
    assert first.state is RunState.FINISHED, first.reason
    without_one = await trained(scene, CLIENTS - 1, **changes)  # type: ignore[arg-type]
    assert without_one.state is RunState.FAILED
    assert "refuses (released: " in without_one.reason
    again = await trained(scene, CLIENTS, **changes)  # type: ignore[arg-type]
    assert again.state is RunState.FINISHED, again.reason


async def test_owners_may_give_that_up(members: Members, tmp_path: Path) -> None:
    async with attacked(members, tmp_path, disclosure={"sets_per_model": "any"}) as scene:
        for count in (CLIENTS, CLIENTS - 1):
            row = await trained(scene, count)
            assert row.state is RunState.FINISHED, row.reason
