"""Secure sums over real gRPC: real client agents, each on a host of its own, and a coordinator."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from support.federation import until
from support.sum_federation import Members, SumFederation, silent, sum_federation

from potluck.common.secagg import MessageType

pytestmark = pytest.mark.asyncio(loop_scope="module")

CLIENTS = 10


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Members:
    return Members.make(tmp_path_factory.mktemp("members"), CLIENTS)


@pytest_asyncio.fixture(loop_scope="module")
async def federation(members: Members, tmp_path: Path) -> AsyncIterator[SumFederation]:
    async with sum_federation(members, tmp_path) as federation:
        await federation.start()
        yield federation


async def test_ten_clients_sum_exactly_and_remember_it(federation: SumFederation) -> None:
    outcome = await federation.sum()
    assert outcome.total is not None
    assert outcome.total.tolist() == federation.counts(federation.members.names).tolist()
    assert outcome.record.hosts == CLIENTS
    [stored] = await federation.stored()
    assert stored.total == tuple(outcome.total.tolist())
    for client in federation.members.names:
        # The coordinator needs but seven clients' shares; the others give theirs in their time.
        await until(partial(federation.has_released, client))
        ledger = federation.ledger(client).of(client)
        [release] = ledger.releases
        assert release.session_id == outcome.record.session_id
        assert sorted(release.clients) == federation.members.names
    again = await federation.sum()  # the identical set may be summed again
    assert again.total is not None
    assert again.record.session_id != outcome.record.session_id


@pytest.mark.parametrize(
    ("stage", "counted"),
    [
        (MessageType.INVITATION, False),
        (MessageType.ROSTER, False),
        (MessageType.DELIVERY, False),
        (MessageType.SURVIVORS, True),
        (MessageType.CERTIFICATE, True),
    ],
)
async def test_clients_that_fall_silent_are_left_out_or_counted(
    federation: SumFederation, stage: MessageType, counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet = ["client-3", "client-7"]
    with silent(monkeypatch, dict.fromkeys(quiet, stage)):
        outcome = await federation.sum(stage_seconds=2.0)
    names = [name for name in federation.members.names if counted or name not in quiet]
    assert outcome.total is not None, outcome.explain()
    assert sorted(outcome.record.clients) == names
    assert np.array_equal(outcome.total, federation.counts(names))
