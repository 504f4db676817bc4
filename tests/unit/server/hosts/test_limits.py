"""Limits on peers: too much at once, or silence for too long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from potluck.common.errors import OverloadedError, ProtocolError, TruncatedError
from potluck.server.hosts.limits import (
    Admission,
    Limits,
    TransferSlots,
    not_left_unread,
    not_too_slow,
    with_first_message,
)

LIMITS = Limits(
    calls_per_peer=2,
    transfers_per_peer=1,
    first_message_seconds=0.01,
    stall_seconds=0.01,
    least_bytes_per_second=100,
)


async def messages(*sizes: int) -> AsyncIterator[bytes]:
    for size in sizes:
        yield bytes(size)


async def silence() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


async def test_call_above_the_limit_of_one_peer_is_refused_and_other_peers_are_not() -> None:
    admission = Admission(LIMITS)
    with admission.call("host a"), admission.call("host a"):
        with pytest.raises(OverloadedError, match="'host a' already has 2 calls in progress"):
            admission.call("host a").__enter__()
        with admission.call("host b"):
            pass
    with admission.call("host a"):
        pass


async def test_transfers_of_one_peer_run_one_after_another() -> None:
    admission = Admission(LIMITS)
    with admission.call("host a"), admission.call("host b"):
        async with admission.transfer("host a"):
            assert admission.transfer("host a").locked()
            assert not admission.transfer("host b").locked()
        assert not admission.transfer("host a").locked()


async def test_number_of_files_sent_at_once_is_limited() -> None:
    turns = TransferSlots(2, seconds=3600, least_bytes=1)
    set_out: asyncio.Queue[str] = asyncio.Queue()
    first_may_end = asyncio.Event()

    async def move(name: str) -> None:
        async with turns.turn(lambda: 0):
            set_out.put_nowait(name)
            if name == "a":
                await first_may_end.wait()

    async with asyncio.TaskGroup() as group:
        async with turns.turn(lambda: 0):
            for name in "abc":
                group.create_task(move(name))
            assert await set_out.get() == "a"
            assert set_out.empty()  # this block holds the second slot
        assert [await set_out.get(), await set_out.get()] == ["b", "c"]
        first_may_end.set()


async def test_slow_file_transfer_frees_its_slot_for_others() -> None:
    turns = TransferSlots(1, seconds=0.001, least_bytes=100)
    moved = 0

    async def others_turn() -> None:
        async with turns.turn(lambda: 0):
            pass

    async with turns.turn(lambda: moved):
        other = asyncio.create_task(others_turn())
        for _ in range(5):
            moved += 100  # just fast enough to keep the slot
            await asyncio.sleep(0)
        await other  # no bytes move any more, so the slot is freed for `other`
    async with turns.turn(lambda: moved):
        last = asyncio.create_task(others_turn())
        await asyncio.sleep(0)
        assert not last.done()  # the slot freed early wasn't freed twice
    await last


async def test_stream_without_a_first_message_in_time_is_refused() -> None:
    assert [len(each) async for each in with_first_message(messages(1, 2), LIMITS)] == [1, 2]
    assert [each async for each in with_first_message(messages(), LIMITS)] == []
    with pytest.raises(ProtocolError, match=r"sent nothing within 0\.01 s"):
        await anext(with_first_message(silence(), LIMITS))


async def test_stalled_upload_is_ended() -> None:
    times = iter(float(second) for second in range(100))
    fast = not_too_slow(messages(300, 300), LIMITS, len, lambda: next(times))
    assert [len(each) async for each in fast] == [300, 300]
    slow = not_too_slow(messages(300, 1, 1, 1, 1), LIMITS, len, lambda: next(times))
    with pytest.raises(TruncatedError, match="at least 100 bytes per second"):
        assert [len(each) async for each in slow] == []
    with pytest.raises(TruncatedError, match="stalled after 0 bytes"):
        await anext(not_too_slow(silence(), LIMITS, len, lambda: 0.0))


async def test_download_that_is_not_read_is_cancelled() -> None:
    async def read_slowly() -> None:
        async for _ in not_left_unread(messages(1, 1), LIMITS):
            await asyncio.Event().wait()

    assert [len(each) async for each in not_left_unread(messages(1, 1), LIMITS)] == [1, 1]
    reading = asyncio.create_task(read_slowly())
    await asyncio.wait([reading], timeout=60)
    assert reading.cancelled()
