from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from potluck.client.base.worker import Worker


async def test_one_thing_at_a_time_in_the_order_asked() -> None:
    done: list[int] = []
    worker = Worker(lambda: done)

    def note(number: int) -> Callable[[list[int]], None]:
        return lambda bench: bench.append(number)

    await asyncio.gather(*(worker.run(note(number)) for number in range(20)))
    worker.close()
    assert done == list(range(20))


async def test_everything_happens_in_one_other_thread() -> None:
    worker = Worker(threading.get_ident)
    threads = {await worker.run(lambda _: threading.get_ident()) for _ in range(3)}
    assert threads == {await worker.run(lambda bench: bench)}
    assert threading.get_ident() not in threads
    worker.close()


async def test_what_is_cancelled_in_the_queue_is_never_begun() -> None:
    worker = Worker(list[str])
    begun, go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def block(bench: list[str]) -> None:
        loop.call_soon_threadsafe(begun.set)
        go_on.wait()
        bench.append("first")

    first = asyncio.create_task(worker.run(block))
    await begun.wait()
    second = asyncio.create_task(worker.run(lambda bench: bench.append("second")))
    third = asyncio.create_task(worker.run(lambda bench: bench.append("third")))
    await asyncio.wait((second,), timeout=0)
    second.cancel()
    await asyncio.wait((second,))
    go_on.set()
    await asyncio.gather(first, third)
    assert await worker.run(lambda bench: list(bench)) == ["first", "third"]
    worker.close()


async def test_what_making_the_bench_raises_is_told() -> None:
    def fail() -> None:
        raise ImportError("no torch here")

    worker = Worker(fail)
    with pytest.raises(ImportError, match="no torch here"):
        await worker.run(lambda _: None)
    worker.close()


async def test_a_thread_that_hangs_is_left_behind() -> None:
    worker = Worker(threading.get_ident, patience_seconds=0.01)
    begun, go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def hang(_: int) -> None:
        loop.call_soon_threadsafe(begun.set)
        go_on.wait()

    hanging = asyncio.create_task(worker.run(hang))
    await begun.wait()
    first = asyncio.create_task(worker.run(lambda ident: ident))
    hanging.cancel()
    others = [await first, *[await worker.run(lambda ident: ident) for _ in range(3)]]
    assert len(set(others)) == 1, "the others have one new thread"
    go_on.set()
    worker.close()


async def test_a_thread_left_behind_ends_where_it_runs_python() -> None:
    worker = Worker(lambda: None, patience_seconds=0.01)
    begun, ended = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def spin(_: None) -> None:
        loop.call_soon_threadsafe(begun.set)
        try:
            while True:
                time.sleep(0.001)
        finally:
            loop.call_soon_threadsafe(ended.set)

    spinning = asyncio.create_task(worker.run(spin))
    await begun.wait()
    spinning.cancel()
    await ended.wait()
    worker.close()
