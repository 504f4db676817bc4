from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from potluck.client.base.worker import Worker, log
from potluck.common.errors import TrainingError


async def test_worker_runs_calls_one_at_a_time_in_order() -> None:
    done: list[int] = []
    worker = Worker(lambda: done)

    def note(number: int) -> Callable[[list[int]], None]:
        return lambda bench: bench.append(number)

    await asyncio.gather(*(worker.run(note(number)) for number in range(20)))
    worker.close()
    assert done == list(range(20))


async def test_worker_runs_all_calls_in_one_separate_thread() -> None:
    worker = Worker(threading.get_ident)
    threads = {await worker.run(lambda _: threading.get_ident()) for _ in range(3)}
    assert threads == {await worker.run(lambda bench: bench)}
    assert threading.get_ident() not in threads
    worker.close()


async def test_call_cancelled_in_the_queue_is_never_started() -> None:
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


async def test_idle_devices_are_prepared_before_the_next_call() -> None:
    worker = Worker(list[str], list[str])

    def prepare(bench: list[str]) -> None:
        bench.append("prepared")
        raise ValueError("dropped")

    worker.prepare(prepare)
    found = await asyncio.gather(*(worker.run(lambda bench: list(bench)) for _ in range(2)))
    assert found == [["prepared"], ["prepared"]]
    worker.close()


async def test_error_from_creating_the_device_state_is_raised_by_the_call() -> None:
    def fail() -> None:
        raise ImportError("no torch here")

    worker = Worker(fail)
    with pytest.raises(ImportError, match="no torch here"):
        await worker.run(lambda _: None)
    worker.close()


async def test_worker_abandons_a_hanging_thread() -> None:
    worker = Worker(threading.get_ident, cancel_timeout_seconds=0.01)
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


async def test_abandoned_thread_ends_at_its_next_python_instruction() -> None:
    worker = Worker(lambda: None, cancel_timeout_seconds=0.01)
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


SLOW_MODULE = """
import time
import gate

assert not gate.imports, "like a library that registers itself, it can't be imported twice"
gate.imports.append(1)
gate.begun()
while not gate.go_on.is_set():
    time.sleep(0.001)
whole = True
"""


async def test_running_import_is_completed_before_its_thread_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_module.py").write_text(SLOW_MODULE)
    (tmp_path / "gate.py").write_text("imports = []")
    monkeypatch.syspath_prepend(tmp_path)
    gate: Any = __import__("gate")
    loop, begun, ended = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    gate.begun, gate.go_on = lambda: loop.call_soon_threadsafe(begun.set), threading.Event()
    worker = Worker(threading.get_ident, cancel_timeout_seconds=0.0)

    def whole() -> bool:
        module: Any = __import__("slow_module")
        return bool(module.whole)

    def train(_: int) -> None:
        try:
            whole()
            while True:
                time.sleep(0.001)
        finally:
            loop.call_soon_threadsafe(ended.set)

    training = asyncio.create_task(worker.run(train))
    await begun.wait()
    waits = asyncio.Event()
    monkeypatch.setattr(log, "info", lambda _: waits.set())
    training.cancel()
    await waits.wait()
    gate.go_on.set()
    await ended.wait()
    assert await worker.run(lambda _: whole())
    worker.close()


async def test_worker_abandons_a_thread_whose_import_never_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "endless_module.py").write_text(SLOW_MODULE.replace("gate", "endless_gate"))
    (tmp_path / "endless_gate.py").write_text("imports = []")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("potluck.client.base.worker.IMPORT_SECONDS", 0.0)
    gate: Any = __import__("endless_gate")
    loop, begun = asyncio.get_running_loop(), asyncio.Event()
    gate.begun, gate.go_on = lambda: loop.call_soon_threadsafe(begun.set), threading.Event()
    worker = Worker(threading.get_ident, cancel_timeout_seconds=0.0)
    importing = asyncio.create_task(worker.run(lambda _: __import__("endless_module")))
    await begun.wait()
    importing.cancel()
    assert await worker.run(lambda ident: ident == threading.get_ident())
    gate.go_on.set()
    module: Any = __import__("endless_module")  # waits for the other thread's import
    assert module.whole
    worker.close()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
async def test_exception_that_would_end_the_event_loop_fails_only_one_call(
    error: type[BaseException],
) -> None:
    worker = Worker(lambda: 7)

    def fail(_: int) -> None:
        raise error("stop")

    with pytest.raises(TrainingError, match=rf"{error.__name__} at test_worker\.py:\d+: stop"):
        await worker.run(fail)
    assert await worker.run(lambda device: device) == 7
    worker.close()
