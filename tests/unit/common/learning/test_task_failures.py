"""Errors in plug-ins name the plug-in, method, file and line."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from potluck.common.errors import TrainerError
from potluck.common.interruptible import in_thread
from potluck.common.learning.task_failures import blamed_on_trainer, crashed, plugin_failure
from potluck.server.selection import Population, SelectionContext
from potluck.server.selectors.uniform import Uniform
from potluck.server.state import State

HERE = re.escape(Path(__file__).name)


class Faulty:
    """A plug-in whose methods fail in many ways."""

    def observe(self) -> None:
        helps()

    def select(self) -> Generator[int, int, None]:
        yield 1
        raise KeyError("x")

    def weigh(self) -> None:
        next(iter(()))

    def judge(self) -> None:
        with Path("nowhere/at/all").open():
            pass

    def own(self) -> None:
        raise OSError(5, "read error")

    def apply(self) -> None:
        int("no\nnumber")


def helps() -> None:
    raise ZeroDivisionError


async def raised(function: Callable[[], Any]) -> Exception:
    """Call a function in another thread; return the exception that it raises."""
    try:
        await in_thread(function)
    except Exception as error:
        return error
    raise AssertionError("it raised nothing")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("method", "why"),
    [
        ("observe", "ZeroDivisionError: no message"),
        ("weigh", "StopIteration: no message"),
        ("own", r"OSError: \[Errno 5\] read error"),
        ("apply", r"ValueError: invalid literal for int\(\) with base 10: 'no\\nnumber'"),
    ],
)
async def test_failure_names_the_plugin_method_and_line_that_raised(method: str, why: str) -> None:
    faulty, other = Faulty(), Faulty()
    error = await raised(getattr(faulty, method))
    line = plugin_failure(error, {"strategy 'sound'": other, "selector 'faulty'": faulty}, 3)
    assert re.fullmatch(
        rf"selector 'faulty' failed in {method} of round 3: {why} \({HERE}:\d+\)", line
    )


@pytest.mark.asyncio
async def test_failure_in_a_generator_names_the_plugin_method() -> None:
    faulty = Faulty()
    asking = faulty.select()
    next(asking)
    line = plugin_failure(await raised(lambda: asking.send(1)), {"selector 'faulty'": faulty})
    assert re.fullmatch(rf"selector 'faulty' failed in select: KeyError: 'x' \({HERE}:\d+\)", line)


@pytest.mark.asyncio
async def test_os_error_inside_a_library_is_not_attributed_to_a_plugin() -> None:
    faulty = Faulty()
    error = await raised(faulty.judge)
    assert isinstance(error, FileNotFoundError)
    assert plugin_failure(error, {"selector 'faulty'": faulty}) == ""


@pytest.mark.asyncio
async def test_failure_outside_plugins_is_not_attributed_to_a_plugin() -> None:
    assert plugin_failure(await raised(helps), {"selector 'uniform'": Uniform()}) == ""


@pytest.mark.asyncio
async def test_failure_in_a_library_names_the_calling_line_of_the_plugin() -> None:
    uniform = Uniform()
    nonsense: Any = SelectionContext(
        round=1,
        seed="seed",  # type: ignore[arg-type]
        count=1,
        population=Population(ids="a", classes=2, samples=None),  # type: ignore[arg-type]
        available=None,  # type: ignore[arg-type]
    )
    error = await raised(lambda: uniform.select(State(), nonsense))
    line = plugin_failure(error, {"selector 'uniform'": uniform})
    assert re.fullmatch(r"selector 'uniform' failed in select: \w+: .* \(\w+\.py:\d+\)", line)


def reads_text_as_numbers() -> None:
    np.loadtxt(["1.5", "text"])


@pytest.mark.asyncio
async def test_failure_in_a_library_names_the_users_line_that_called_it() -> None:
    error = await raised(reads_text_as_numbers)
    line = reads_text_as_numbers.__code__.co_firstlineno + 1
    assert f" at {Path(__file__).name}:{line}: could not convert" in crashed(error).message
    with pytest.raises(TrainerError, match=rf"\({HERE}:{line}\)"), blamed_on_trainer("x", "c"):
        reads_text_as_numbers()


def test_failure_outside_the_users_code_names_the_innermost_line() -> None:
    error = ValueError("x")
    assert crashed(error).message == "ValueError: x; check the task's code and data"
    with pytest.raises(ValueError, match="text") as caught:
        np.loadtxt(["text"])
    error.__traceback__ = caught.tb.tb_next  # without this function
    assert re.match(r"ValueError at \w*npyio\w*\.py:\d+: x;", crashed(error).message)
