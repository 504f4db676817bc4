"""Connections that drop packets silently, in each direction: detected within 15 s, and resumed
without a restart.

There is one host per direction, in a network namespace of its own, and one undisturbed host.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from support import namespaces
from support.federation import Federation, crash_federation, set_values, until
from support.namespaces import Direction, Namespace
from support.promises import in_time

from potluck.common.net.identity import Role
from potluck.deploy.local.demo_files import LOOPBACK, program
from potluck.deploy.local.processes import TetheredProcess, stop_all
from potluck.deploy.pki import authority as pki
from potluck.rpc.v1 import operator_pb2

pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(bool(namespaces.why_not()), reason=namespaces.why_not() or "possible"),
]
INCLUDED = operator_pb2.MEMBER_STATE_INCLUDED
LOST = operator_pb2.MEMBER_STATE_LOST
NOTICED_SECONDS = 15.0
CUT_SECONDS = 5.0
REMOTE = {1: Direction.UP, 2: Direction.DOWN, 3: Direction.BOTH}
"""Direction in which packets are lost, by number of the host."""


class Scene:
    """The federation and the cables of the remote hosts."""

    def __init__(self, federation: Federation, cables: dict[int, Namespace]) -> None:
        self.federation = federation
        self.cables = cables

    def cut(self) -> None:
        for number, cable in self.cables.items():
            cable.cut(REMOTE[number])

    def heal(self) -> None:
        for cable in self.cables.values():
            cable.heal()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scene]:
    folder = tmp_path_factory.mktemp("networks")
    with contextlib.ExitStack() as stack:
        cables = {number: stack.enter_context(namespaces.namespace(number)) for number in REMOTE}
        async with crash_federation(
            folder, clients=4, hosts=4, count=4, rounds=2, start_hosts=False
        ) as federation:
            await listen_everywhere(federation, [cable.here for cable in cables.values()])
            await federation.processes.start_host(0)
            hosts = [await start_inside(federation, *each) for each in cables.items()]
            try:
                await federation.until_attending()
                yield Scene(federation, cables)
            finally:
                await stop_all(hosts)


async def listen_everywhere(federation: Federation, addresses: list[str]) -> None:
    """Make the coordinator listen at this machine's end of each cable, with a certificate for these
    addresses."""
    files = federation.files
    names = [LOOPBACK, *addresses]
    pki.issue(files.folder / "pki", Role.COORDINATOR, "coordinator", hosts=names, force=True)
    port = files.operator.coordinator.rpartition(":")[2]
    set_values(files.coordinator, {"listen": f"0.0.0.0:{port}"})
    await federation.kill_coordinator()
    await federation.restart_coordinator()


async def start_inside(federation: Federation, number: int, cable: Namespace) -> TetheredProcess:
    path = federation.files.hosts[number]
    port = federation.files.operator.coordinator.rpartition(":")[2]
    set_values(path, {"coordinator": f"{cable.here}:{port}"})
    command = cable.command(program("potluck-client"), "--config", str(path))
    log = federation.files.log(path.stem)
    return await TetheredProcess.start(path.stem, command, log=log)


@pytest_asyncio.fixture(loop_scope="module")
async def scene(shared: Scene) -> AsyncIterator[Scene]:
    shared.federation.points.clear()
    await shared.federation.until_attending()
    yield shared
    shared.heal()


async def at_work(scene: Scene, *assignments: str) -> str:
    """Start a run; return its id when all clients beyond the cables train."""
    trainings = [f"train-client-{number}" for number in REMOTE]
    scene.federation.points.hold(*trainings)
    run_id = await scene.federation.start_run(*assignments)
    await until(lambda: all(map(scene.federation.points.reached, trainings)))
    return run_id


async def test_short_network_cut_gives_the_same_run(scene: Scene) -> None:
    federation = scene.federation
    undisturbed = await federation.finished(await federation.start_run())
    run_id = await at_work(scene)
    scene.cut()
    federation.points.release()
    await asyncio.sleep(CUT_SECONDS)  # the duration of the cut is under test
    scene.heal()
    assert await federation.finished(run_id) == undisturbed


async def test_permanent_network_cut_is_detected_and_the_round_continues(scene: Scene) -> None:
    federation = scene.federation
    run_id = await at_work(scene, "rounds=1", "round.leavers=drop", "round.quorum=0.2")
    scene.cut()
    await in_time(NOTICED_SECONDS, federation.until_attending(1))
    await federation.finished(run_id)
    [entry] = await federation.history(run_id)
    states = {member.client_id: member.state for member in entry.members}
    assert states == {"client-0": INCLUDED} | {f"client-{number}": LOST for number in REMOTE}
    federation.points.release()
    scene.heal()
    await federation.until_attending()
    everybody = await federation.start_run("rounds=1")
    await federation.finished(everybody)
    [entry] = await federation.history(everybody)
    assert {member.state for member in entry.members} == {INCLUDED}
