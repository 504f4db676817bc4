"""Updates that a relay receives from hosts and delivers to the coordinator."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.federation import until
from support.promises import in_time

from potluck.common.errors import RoundClosedError, TruncatedError
from potluck.common.net.identity import Identity, Role, parse_claims
from potluck.common.net.protocol import FRAMING_VERSION
from potluck.common.net.transfer import FileReceiver, verified
from potluck.common.tensors.digest import digest_of
from potluck.relay import relayed_updates
from potluck.relay.held_updates import HeldUpdates
from potluck.relay.relay_metrics import RelayMetrics
from potluck.relay.relayed_updates import RelayedUpdates
from potluck.relay.upstream import Upstream
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1 import transfer_pb2

CONTENT = b"x" * 5000
HEADER = transfer_pb2.UpdateHeader(
    version=FRAMING_VERSION,
    update_id="run/1/1/client-0",
    client_id="client-0",
    run_id="run",
    blake3=digest_of(CONTENT),
    size=len(CONTENT),
    sequence=1,
)
HOST = Identity(federation="f", role=Role.HOST, name="host-0", claims=parse_claims(["client-0"]))


async def frames() -> AsyncIterator[Any]:
    yield rpc.SubmitUpdateRequest(frame=transfer_pb2.UpdateFrame(header=HEADER))
    yield memoryview(CONTENT)
    trailer = transfer_pb2.FileTrailer(blake3=HEADER.blake3)
    yield rpc.SubmitUpdateRequest(frame=transfer_pb2.UpdateFrame(trailer=trailer))


def files(folder: Path) -> list[str]:
    return [path.suffix for path in folder.iterdir()]


def training() -> rpc.Instruction:
    instruction = rpc.Instruction(
        id=HEADER.update_id, client_id="client-0", run_id="run", train=rpc.Train()
    )
    instruction.time_left.FromSeconds(60)
    return instruction


def updates_in(folder: Path, upstream: SimpleNamespace) -> RelayedUpdates:
    return RelayedUpdates(
        cast("Upstream", upstream),
        HeldUpdates(folder, now=time.time()),
        maximum_bytes=1 << 20,
        wait_seconds=0,
        clock=time.time,
        metrics=RelayMetrics(),
    )


@pytest.mark.asyncio
async def test_update_is_delivered_if_its_host_disconnects_while_it_is_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verifying, may_end = asyncio.Event(), asyncio.Event()
    delivered: asyncio.Queue[tuple[str, int]] = asyncio.Queue()

    async def slowly(receiver: FileReceiver, blake3: str) -> Path:
        verifying.set()
        await may_end.wait()
        return await verified(receiver, blake3)

    async def deliver(
        _link: object, header: transfer_pb2.UpdateHeader, path: Path, *, fresh: bool
    ) -> None:
        assert fresh
        delivered.put_nowait((header.update_id, path.stat().st_size))  # noqa: ASYNC240  # one look

    monkeypatch.setattr(relayed_updates, "verified", slowly)
    monkeypatch.setattr(relayed_updates, "deliver_file", deliver)
    updates = updates_in(tmp_path, SimpleNamespace(link=None))
    updates.expected.see(training(), "host-0")
    call = asyncio.create_task(updates.take(frames(), HOST))
    await in_time(0, verifying.wait())
    call.cancel()
    may_end.set()
    await asyncio.gather(call, return_exceptions=True)
    assert call.cancelled()
    assert await in_time(0, delivered.get()) == (HEADER.update_id, len(CONTENT))
    await updates.close()


@pytest.mark.asyncio
async def test_stream_that_begins_after_its_round_leaves_no_file(tmp_path: Path) -> None:
    async def locate(_request: rpc.LocateUploadRequest) -> rpc.LocateUploadResponse:
        raise RoundClosedError("the round is over")

    updates = updates_in(tmp_path, SimpleNamespace(link=None, locate=locate))
    updates.expected.see(training(), "host-0")
    settle = rpc.Settle(update_id=HEADER.update_id)
    updates.expected.see(
        rpc.Instruction(id="s", client_id="client-0", run_id="run", settle=settle), "host-0"
    )
    with pytest.raises(RoundClosedError, match="the round is over"):
        await updates.take(frames(), HOST)
    assert not files(tmp_path)
    await updates.close()


@pytest.mark.asyncio
async def test_stream_that_breaks_after_its_training_was_abandoned_leaves_no_file(
    tmp_path: Path,
) -> None:
    asked, may_answer = asyncio.Event(), asyncio.Event()
    arrived, broken = asyncio.Event(), asyncio.Event()

    async def locate(_request: rpc.LocateUploadRequest) -> rpc.LocateUploadResponse:
        asked.set()
        await may_answer.wait()
        return rpc.LocateUploadResponse()

    async def breaking() -> AsyncIterator[Any]:
        yield rpc.SubmitUpdateRequest(frame=transfer_pb2.UpdateFrame(header=HEADER))
        yield memoryview(CONTENT[:100])
        arrived.set()
        await broken.wait()

    updates = updates_in(tmp_path, SimpleNamespace(link=None, locate=locate))
    call = asyncio.create_task(updates.take(breaking(), HOST))
    await in_time(0, asked.wait())
    abandon = rpc.Abandon(instruction_ids=[HEADER.update_id])
    updates.expected.see(rpc.Instruction(id="a", abandon=abandon), "host-0")
    may_answer.set()
    await in_time(0, arrived.wait())
    assert files(tmp_path) == [".part"]
    broken.set()
    with pytest.raises(TruncatedError):
        await call
    await until(lambda: not files(tmp_path), "the part is deleted")
    await updates.close()
