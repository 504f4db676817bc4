"""A noisy vector leaves a client again only unchanged, for the set of clients it was made for.

Two sums over sets that differ by one client, with the same noisy vectors of all others, would leave
that client's update under its own share of noise alone.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from adversary.conftest import CLIENTS, Scene, attacked
from adversary.proxy import Script
from numpy.typing import NDArray
from support.sum_federation import Members

from potluck.client.private_training import SumGrid, UpdateNoise
from potluck.privacy.host.client_noise import ClientNoise
from potluck.privacy.host.host_guard import HostGuard
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.secagg.protocol import SessionRecord
from potluck.server.store import RunState

VICTIM, HOST = "client-2", "host-2"
RUN_FILE = f"""
secure_aggregation = true
rounds = 1
clients_per_round = {CLIENTS}
expected_clients = {CLIENTS}
task = {{name = "digits", clients = {CLIENTS}}}
training = {{epochs = 1}}
evaluation = {{every = 0}}
masking = {{stage_seconds = 20.0, colluding_hosts = 1}}
round = {{deadline_seconds = 60.0, leavers = "drop"}}

[privacy]
unit = "client"
noise_multiplier = 4.0
clip = 0.5
"""
Draw = Callable[[int], NDArray[np.int64]]


class BrokenConnection(Script):
    """Records the victim's uploads. Every second connection breaks at the end of its upload.

    lost, arrived: bytes of the file in broken and in complete uploads, by their offset. updates:
    ids of the uploaded updates.
    """

    def __init__(self) -> None:
        self.lost: dict[int, bytes] = {}
        self.arrived: dict[int, bytes] = {}
        self.updates: set[str] = set()
        self._connections = 0

    def loses(self, host: str, frames: Sequence[rpc.SubmitUpdateRequest]) -> bool:
        if host != HOST:
            return False
        header = frames[0].frame.header
        self.updates.add(header.update_id)
        self._connections += 1
        lost = self._connections % 2 == 1
        parts = self.lost if lost else self.arrived
        parts[header.offset] = b"".join(each.frame.chunk for each in frames)
        return lost


@pytest_asyncio.fixture
async def scene(members: Members, tmp_path: Path) -> AsyncIterator[Scene]:
    async with attacked(members, tmp_path, disclosure={"training_epsilon": 100.0}) as scene:
        yield scene


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[NDArray[np.int64]]:
    """Record the victim's noise: one array for each charge of its ledger."""
    honest, found = HostGuard.hide_update, list[NDArray[np.int64]]()
    charge = ClientNoise.charge

    def kept(noise: ClientNoise, grid: SumGrid) -> Draw:
        draw, place = charge(noise, grid), len(found)
        found.append(np.empty(0, np.int64))

        def drawing(count: int) -> NDArray[np.int64]:
            some = draw(count)
            found[place] = np.append(found[place], some)
            return some

        return drawing

    def hide_update(self: HostGuard, instruction: rpc.Instruction) -> UpdateNoise:
        noise = honest(self, instruction)
        if instruction.client_id == VICTIM:
            assert isinstance(noise, ClientNoise)
            monkeypatch.setattr(noise, "charge", lambda grid: kept(noise, grid))
        return noise

    monkeypatch.setattr(HostGuard, "hide_update", hide_update)
    return found


def charges(scene: Scene) -> list[dict[str, Any]]:
    path = scene.federation.folder / HOST / "privacy" / f"{VICTIM}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]


async def test_vector_sent_again_after_a_disconnect_is_identical_and_not_charged(
    scene: Scene, drawn: list[NDArray[np.int64]]
) -> None:
    scene.liar.script = script = BrokenConnection()
    row = await scene.federation.finished(RUN_FILE)
    assert row.state is RunState.FINISHED, row.reason
    sent = bytearray(sum(map(len, script.arrived.values())))
    for offset, part in script.arrived.items():
        sent[offset : offset + len(part)] = part
    assert len(sent) > 10_000
    assert script.lost
    for offset, part in script.lost.items():
        assert sent[offset : offset + len(part)] == part
    assert len(script.updates) == 1
    assert len(drawn) == len(charges(scene)) == 1
    assert VICTIM in await summed(scene, row.run_id)


async def test_vector_for_another_set_has_fresh_noise_and_a_fresh_charge(
    scene: Scene, drawn: list[NDArray[np.int64]]
) -> None:
    """Both sums are over updates of the same model with the same settings."""
    sets = []
    for count in (CLIENTS, CLIENTS - 1):
        row = await scene.federation.finished(
            RUN_FILE.replace(f"per_round = {CLIENTS}", f"per_round = {count}")
        )
        assert row.state is RunState.FINISHED, row.reason
        sets.append(await summed(scene, row.run_id))
    assert [len(each) for each in sets] == [CLIENTS, CLIENTS - 1]
    assert VICTIM in sets[1]
    assert len(drawn) == len(charges(scene)) == 2
    first, second = drawn
    assert first.size == second.size > 1000
    # Independent noise: the correlation of two draws is near 0, that of a draw with itself is 1.
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.2


async def summed(scene: Scene, run_id: str) -> tuple[str, ...]:
    """Return the clients in the sum of a run's only round."""
    [only] = [each for each in await scene.federation.stored() if each.run_id == run_id]
    return tuple(SessionRecord.model_validate(only.record).clients)
