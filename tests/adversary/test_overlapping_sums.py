"""Several exact sums over overlapping sets, which together reveal one client's counts.

Before an input was bound to one set, totals over {0, …, 4}, {5, …, 9} and {0, …, 10} revealed
client 10's histogram. No client was in all three sets, and each refused only sums that would
reveal counts together with its own earlier sums.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio
from adversary.conftest import Scene, attacked
from adversary.proxy import Script
from support.federation import until
from support.sum_federation import EXACT, Members, host_of

from potluck.common.disclosure import SumKind
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1 import secure_aggregation_pb2 as wire
from potluck.secagg.coordinator.counts import SumOutcome
from potluck.secagg.protocol import Envelope, Rule, decode, encode
from potluck.secagg.protocol.wire.messages import Survivors

NAMES = [f"client-{number}" for number in range(11)]
LAST = NAMES[10]


@pytest.fixture(scope="module")
def eleven(tmp_path_factory: pytest.TempPathFactory) -> Members:
    return Members.make(tmp_path_factory.mktemp("eleven"), len(NAMES))


@pytest_asyncio.fixture
async def crowd(eleven: Members, tmp_path: Path) -> AsyncIterator[Scene]:
    async with attacked(eleven, tmp_path, disclosure=EXACT) as scene:
        yield scene


async def released(scene: Scene, *clients: str) -> None:
    """Wait until these clients have given their shares."""
    for name in clients:
        await until(partial(scene.federation.has_released, name))


def told(scene: Scene, client: str) -> list[str]:
    """Return the rules that a client has named in refusals, with its reasons."""
    envelopes = [
        decode(Envelope, each.SerializeToString(deterministic=True))
        for host, message in scene.liar.said
        if host == host_of(client)
        for each in message.answer.secure.envelopes
        if each.type == wire.SECURE_MESSAGE_TYPE_REFUSAL
    ]
    return [envelope.payload.decode(errors="replace") for envelope in envelopes]


async def test_sums_of_two_halves_and_all_do_not_reveal_the_remaining_client(crowd: Scene) -> None:
    federation = crowd.federation
    for half in (NAMES[:5], NAMES[5:10]):
        outcome = await federation.sum(half)
        assert outcome.total is not None, outcome.explain()
        await released(crowd, *half)
    whole = await federation.sum(NAMES)
    assert whole.total is None
    first = [each.record for each in await federation.stored()][2]
    assert first["refusals"] == dict.fromkeys(NAMES[:10], Rule.RELEASED.value)
    assert not federation.has_released(LAST)
    assert not federation.ledger(LAST).of(LAST).uploads


@pytest.mark.parametrize(
    "kinds", [(SumKind.TOTAL, SumKind.CELLS), (SumKind.CELLS, SumKind.TOTAL)], ids=str
)
async def test_client_in_a_total_refuses_a_cell_and_vice_versa(
    crowd: Scene, kinds: tuple[SumKind, SumKind]
) -> None:
    federation, (first, second) = crowd.federation, kinds
    assert (await federation.sum(NAMES[:5], kind=first)).total is not None
    await released(crowd, *NAMES[:5])
    others = await federation.sum(NAMES, kind=second)
    assert others.total is None
    assert others.record.refusals == dict.fromkeys(NAMES[:5], Rule.RELEASED.value)
    assert not any(map(federation.has_released, NAMES[5:]))


class Silenced(Script):
    """Sends one client no message after its upload, so that the others complete the sum."""

    def __init__(self, victim: str) -> None:
        self._host = host_of(victim)

    def to_host(self, host: str, message: rpc.AttendResponse) -> Iterable[rpc.AttendResponse]:
        kind = message.instruction.secure.envelope.type
        late = kind in (
            wire.SECURE_MESSAGE_TYPE_SURVIVORS,
            wire.SECURE_MESSAGE_TYPE_CERTIFICATE,
        )
        return [] if host == self._host and late else [message]


async def silenced(scene: Scene, victim: str, clients: list[str]) -> SumOutcome:
    """Return a sum that includes a client that received no request for its shares."""
    scene.liar.script = Silenced(victim)
    outcome = await scene.federation.sum(clients, stage_seconds=6.0)
    scene.liar.script = Script()
    assert outcome.total is not None, outcome.explain()
    assert victim in outcome.record.clients
    assert not scene.federation.has_released(victim)
    return outcome


async def test_client_cut_off_after_its_upload_joins_no_other_sum(crowd: Scene) -> None:
    federation, victim = crowd.federation, NAMES[5]
    await silenced(crowd, victim, NAMES[:6])
    other = await federation.sum(NAMES[5:])
    assert other.total is None or victim not in other.record.clients
    assert any("may be complete" in why for why in told(crowd, victim))


async def test_cut_off_client_joins_the_same_sum_after_receiving_the_certificate(
    crowd: Scene,
) -> None:
    federation, victim = crowd.federation, NAMES[5]
    first = await silenced(crowd, victim, NAMES[:6])
    again = await federation.sum(NAMES[:6])
    assert again.total is not None, again.explain()
    assert again.record.clients == first.record.clients
    await released(crowd, victim)


class TwoSets(Script):
    """Sends half of the clients another set of survivors than the other half."""

    def to_host(self, host: str, message: rpc.AttendResponse) -> Iterable[rpc.AttendResponse]:
        step = message.instruction.secure
        if step.envelope.type == wire.SECURE_MESSAGE_TYPE_SURVIVORS and host > host_of(NAMES[5]):
            envelope = decode(Envelope, step.envelope.SerializeToString(deterministic=True))
            shown = decode(Survivors, envelope.payload)
            fewer = replace(shown, clients=tuple(c for c in shown.clients if c != NAMES[0]))
            forged = replace(envelope, payload=encode(fewer))
            step.envelope.CopyFrom(wire.SecureEnvelope.FromString(encode(forged)))
        return [message]


async def test_two_groups_with_different_survivor_sets_release_no_sum(crowd: Scene) -> None:
    crowd.liar.script = TwoSets()
    outcome = await crowd.federation.sum(NAMES)
    assert outcome.total is None
    assert not any(map(crowd.federation.has_released, NAMES))
