"""A relay whose disk is full or fails reports it by its own name, and the run waits for it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from support import mounts
from support.federation import Federation, crash_federation, until
from support.relays import Relay, relays_of

from potluck.rpc.v1 import operator_pb2

pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(bool(mounts.why_not()), reason=mounts.why_not() or "can mount"),
]
MEGABYTE = 1 << 20
TRAININGS = [f"train-client-{number}" for number in range(4)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def federation(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Federation]:
    """Run a federation whose models have two megabytes."""
    async with crash_federation(
        tmp_path_factory.mktemp("relay-disks"),
        clients=4,
        hosts=2,
        count=4,
        rounds=2,
        assignments=["task.parameters=500000"],
        start_hosts=False,
    ) as federation:
        yield federation


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(federation: Federation) -> str:
    """Return the digest of the final model of a run without a relay."""
    await federation.start_hosts()
    await federation.until_attending()
    return await federation.finished(await federation.start_run())


async def moved(federation: Federation) -> None:
    """Restart the hosts, without models, behind the relay in their configuration."""
    federation.points.clear()
    for host in list(federation.processes.hosts.values()):
        await host.stop()
    for path in federation.files.folder.glob("host-*/models/*"):
        path.unlink()
    await federation.start_hosts()
    await federation.until_attending()


def both_train(federation: Federation) -> bool:
    """Return True if a client of each host is held in its training; a host trains one at a time."""
    reached = [federation.points.reached(each) for each in TRAININGS]
    return any(reached[:2]) and any(reached[2:])


async def until_named(federation: Federation, relay: Relay, before: float) -> float:
    """Wait until both hosts are refused more than before; check that only the relay is blamed."""

    def refusals() -> float:
        return relay.metric("potluck_relay_calls_refused_total", reason="RELAY_STORAGE_FAILED")

    await until(lambda: refusals() >= before + 3, "the relay refuses because of its disk")
    assert "the relay's disk failed: " in relay.log.read_text()
    blamed: list[str] = []
    for number in range(2):
        lines = federation.files.log(f"host-{number}").read_text().splitlines()
        found = [json.loads(line) for line in lines if "interrupted" in line]
        blamed += [line["error"] for line in found if "disk" in line["error"]]
    assert blamed
    assert all(error.startswith("the relay's disk failed: ") for error in blamed), blamed
    for log in (relay.log, federation.files.log("coordinator")):
        assert "Traceback" not in log.read_text()
    return refusals()


async def test_full_relay_disk_is_named_and_the_run_finishes_once_space_is_free(
    federation: Federation, undisturbed: str
) -> None:
    disk = federation.files.folder / "full"
    with mounts.tmpfs(disk, megabytes=32):
        async with relays_of(federation, {"full": [0, 1]}) as relays:
            relay = relays["full"]
            await moved(federation)
            run_id = await federation.before_round_two()
            filler = filled(relay, leave_bytes=MEGABYTE)
            federation.points.hold(*TRAININGS)
            federation.points.release("select", "weigh")
            count = await until_named(federation, relay, 0)  # the disk has no space for the model
            filler.unlink()
            await until(lambda: both_train(federation), "both hosts train")
            filler = filled(relay, leave_bytes=MEGABYTE)
            federation.points.release()
            await until_named(federation, relay, count)  # and none for an update
            assert (await federation.status(run_id)).state == operator_pb2.RUN_STATE_RUNNING
            filler.unlink()
            assert await federation.finished(run_id) == undisturbed
            await until(lambda: not list((relay.state / "updates").iterdir()))


def mended(disk: mounts.FailingDisk) -> bool:
    try:
        disk.mend()
    except RuntimeError as error:
        if "busy" not in str(error):
            raise
        return False
    return True


def filled(relay: Relay, *, leave_bytes: int) -> Path:
    """Delete the relay's spare files, then fill its disk; return the file that fills it."""
    for spare in relay.state.glob("files.spare/*"):
        spare.unlink()
    return mounts.fill(relay.state, leave_bytes=leave_bytes)


@pytest.mark.skipif(
    bool(mounts.why_no_failing_disk()), reason=mounts.why_no_failing_disk() or "can fail"
)
async def test_read_only_relay_disk_is_named_and_the_run_finishes_after_its_repair(
    federation: Federation, undisturbed: str
) -> None:
    folder = federation.files.folder / "broken"
    with mounts.failing_disk(folder, megabytes=64) as disk:
        async with relays_of(federation, {"broken": [0, 1]}) as relays:
            relay = relays["broken"]
            await moved(federation)
            federation.points.hold(*TRAININGS)
            run_id = await federation.start_run()
            await until(lambda: both_train(federation), "both hosts train")
            disk.turn_read_only()
            federation.points.release()
            await until_named(federation, relay, 0)
            assert (await federation.status(run_id)).state == operator_pb2.RUN_STATE_RUNNING
            await relay.kill()
            await until(lambda: mended(disk), "the killed process leaves the disk")
            await relay.start()
            assert await federation.finished(run_id) == undisturbed
