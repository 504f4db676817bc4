"""Telling clients how a round ended, so that they keep or drop what they have of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from potluck.rpc.v1 import coordinator_pb2
from potluck.server.environment import now
from potluck.server.standing import Standing
from potluck.server.wire import train_instruction_id

_SETTLE_SECONDS: Final = 3600.0
"""How long a client is tried to be told."""


def tell_settled(
    run: Standing, round_number: int, attempt: int, cohort: Mapping[str, bool]
) -> None:
    """A round is committed. cohort: of each client, whether its update is part of the model.

    Telling a client again does nothing.
    """
    run_id = run.row.run_id
    for client, included in cohort.items():
        update_id = train_instruction_id(run_id, round_number, attempt, client)
        instruction = coordinator_pb2.Instruction(
            id=f"{update_id}/settle",
            client_id=client,
            run_id=run_id,
            round=round_number,
            settle=coordinator_pb2.Settle(included=included),
        )
        run.environment.attendance.instruct(
            instruction, deadline=now() + _SETTLE_SECONDS, until_acknowledged=True
        )
