"""Streams that carry the same update: a newer one ends an older one."""

from __future__ import annotations

import asyncio

import pytest

from potluck.common.errors import TruncatedError
from potluck.server.service.upload_order import UploadOrder

UPDATE, FILE = "run/1.1/client-0", "0" * 64


class Stream:
    """A stream that receives until it is ended."""

    def __init__(self, order: UploadOrder, sequence: int, file: str = FILE) -> None:
        self.receiving = asyncio.Event()
        self.task = asyncio.create_task(self._receive(order, sequence, file))

    async def _receive(self, order: UploadOrder, sequence: int, file: str) -> None:
        async with order.turn(UPDATE, file, sequence), order.receiving(UPDATE, file):
            self.receiving.set()
            await asyncio.Event().wait()

    async def overtaken(self) -> bool:
        try:
            await self.task
        except TruncatedError as error:
            return "is being sent on a newer stream" in error.message
        return False


async def test_resuming_an_upload_ends_the_running_stream_and_waits_for_its_end() -> None:
    order = UploadOrder()
    older = Stream(order, 1)
    await older.receiving.wait()
    async with order.resumed(UPDATE, FILE) as sequence:
        assert older.task.done()
        assert sequence == 2
    assert await older.overtaken()


async def test_upload_stream_that_arrives_after_a_newer_one_is_refused() -> None:
    order = UploadOrder()
    async with order.resumed(UPDATE, FILE) as sequence:
        late = Stream(order, 1)
    assert await late.overtaken()
    assert not late.receiving.is_set()
    newer = Stream(order, sequence)
    await newer.receiving.wait()
    newer.task.cancel()


async def test_newer_upload_stream_ends_an_older_one_that_is_queued() -> None:
    order = UploadOrder()
    async with order.resumed(UPDATE, FILE) as sequence:
        waiting = Stream(order, sequence)
        newest = Stream(order, sequence + 1)
        await asyncio.sleep(0)  # both have begun to wait
    assert await waiting.overtaken()
    await newest.receiving.wait()
    newest.task.cancel()


async def test_upload_streams_without_a_sequence_number_wait_for_each_other() -> None:
    order = UploadOrder()
    first = Stream(order, 0)
    await first.receiving.wait()
    second = Stream(order, 0)
    await asyncio.sleep(0)
    first.task.cancel()
    await second.receiving.wait()
    second.task.cancel()


async def test_upload_stream_of_another_file_of_the_update_is_not_ended() -> None:
    order = UploadOrder()
    first = Stream(order, 1)
    await first.receiving.wait()
    second = Stream(order, 7, file="1" * 64)
    await asyncio.sleep(0)
    assert not first.task.done()
    first.task.cancel()
    await second.receiving.wait()
    second.task.cancel()


async def test_cancelled_upload_stream_is_not_reported_as_replaced() -> None:
    stream = Stream(UploadOrder(), 1)
    await stream.receiving.wait()
    stream.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stream.task
