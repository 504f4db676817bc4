"""A host's part in secure sums: which training goes into which sum."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.secure_sums import Federation

from potluck.client.disclosure.disclosure_policy import DisclosurePolicy
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1 import secure_aggregation_pb2 as wire
from potluck.secagg.host.sum_ledger import SumLedger
from potluck.secagg.host.sum_sessions import SumSessions
from potluck.secagg.protocol import Purpose, encode


async def test_invitation_with_the_update_of_another_client_is_not_answered(tmp_path: Path) -> None:
    """The ids are the coordinator's. It could otherwise have a client, which expects the sum of one
    training, put the update of another training into it."""
    federation = Federation(clients=6, purpose=Purpose.UPDATE)
    membership: Any = SimpleNamespace(party=lambda name, _: federation.parties[name])
    budget: Any = SimpleNamespace()
    host = SumSessions(
        policy=DisclosurePolicy(), membership=membership, budget=budget, ledger=SumLedger(tmp_path)
    )
    run = federation.run()
    host.appointments.of("a", "u").expected.set_result(federation.expected(run.header))
    invitation = wire.SecureEnvelope.FromString(encode(run.next("b")))
    step = rpc.SecureStep(session_id=run.header.session_id, update_id="u", envelope=invitation)

    async def count() -> list[int]:
        pytest.fail("the invitation is for an update")

    answer = asyncio.create_task(host.answer(rpc.Instruction(client_id="b", secure=step), count))
    for _ in range(20):  # many more steps than the answer takes
        await asyncio.sleep(0)
    assert not answer.done()  # it waits for the training of b
    answer.cancel()
    await asyncio.wait([answer])
