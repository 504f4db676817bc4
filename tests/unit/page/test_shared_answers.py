"""Answers shared by concurrent requests of the web UI."""

import asyncio

import pytest

from potluck.common.errors import UnreachableError
from potluck.page.coordinator_link import SharedAnswers


class Coordinator:
    """A fake coordinator. Once `may` is set, it answers with the number of the request."""

    def __init__(self) -> None:
        self.asked = 0
        self.may = asyncio.Event()

    async def ask(self) -> int:
        self.asked += 1
        number = self.asked
        await self.may.wait()
        if number == 1:
            raise UnreachableError("away")
        return number


async def test_concurrent_requests_share_an_answer_and_not_an_error() -> None:
    coordinator, answers = Coordinator(), SharedAnswers[int](60.0)
    waiting = [asyncio.create_task(answers.of("run", coordinator.ask)) for _ in range(3)]
    await asyncio.sleep(0)
    coordinator.may.set()
    found = await asyncio.gather(*waiting, return_exceptions=True)
    assert [str(each) for each in found] == ["away"] * 3
    assert coordinator.asked == 1
    assert [await answers.of("run", coordinator.ask) for _ in range(3)] == [2, 2, 2]
    assert await answers.of("another", coordinator.ask) == 3


async def test_expired_shared_answer_is_requested_again() -> None:
    coordinator, answers = Coordinator(), SharedAnswers[int](0.0)
    coordinator.may.set()
    with pytest.raises(UnreachableError):
        await answers.of("run", coordinator.ask)
    assert [await answers.of("run", coordinator.ask) for _ in range(2)] == [2, 3]


async def test_cancelled_request_does_not_cancel_the_shared_answer() -> None:
    coordinator, answers = Coordinator(), SharedAnswers[int](60.0)
    coordinator.asked = 1
    leaving = asyncio.create_task(answers.of("run", coordinator.ask))
    staying = asyncio.create_task(answers.of("run", coordinator.ask))
    await asyncio.sleep(0)
    leaving.cancel()
    coordinator.may.set()
    assert await staying == 2
