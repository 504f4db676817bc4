"""Options of the test suite."""

from __future__ import annotations

import gc
import os
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from support.shared_forks import end_shared_forks
from support.side_by_side import ordered, unit_of

import potluck.common.errors  # noqa: F401  # before grpc, which reads its settings once: as programs do

# No deadline for an example: its time depends on how busy the machine is. `timeout` in
# pyproject.toml ends tests that hang. A test draws the same examples in every run, until its source
# changes; with `--hypothesis-profile search`, it draws others each time.
hypothesis.settings.register_profile("search", deadline=None)
hypothesis.settings.register_profile("potluck", deadline=None, derandomize=True)
hypothesis.settings.load_profile("potluck")

# Variables that a terminal, a CI service or a user has set. They would change the width and colours
# of Potluck's output, and where Potluck looks for settings.
_NOT_FOR_TESTS = (
    *("COLUMNS", "LINES", "TERMINAL_WIDTH", "TTY_COMPATIBLE", "TTY_INTERACTIVE"),
    *("FORCE_COLOR", "NO_COLOR", "PY_COLORS", "GITHUB_ACTIONS"),
    *("XDG_CONFIG_HOME", "XDG_CACHE_HOME"),
)
for _name in _NOT_FOR_TESTS:
    os.environ.pop(_name, None)

# Tests send requests to Prometheus, object stores and more on this machine: use no proxy for it.
_HERE = ("localhost", "127.0.0.1", "::1")
for _name in ("no_proxy", "NO_PROXY"):
    os.environ[_name] = ",".join(filter(None, [os.environ.get(_name), *_HERE]))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option `--rewrite`: tests that compare results with stored files write the files
    again."""
    parser.addoption(
        "--rewrite",
        action="store_true",
        help="keep what the round machine answers, and how rounds are shown, as it is now",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m slow`, skip files without the word: importing all others takes each worker half a
    minute."""
    if config.option.markexpr != "slow" or not collection_path.match("test_*.py"):
        return None
    return True if "slow" not in collection_path.read_text() else None


@pytest.hookimpl(trylast=True)  # after `-m` and `-k` have selected tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move the tests that take longest to the front."""
    places = {test: place for place, test in enumerate(ordered([each.nodeid for each in items]))}
    items.sort(key=lambda item: places[item.nodeid])


def pytest_collection_finish() -> None:
    """Exempt modules and collected tests from garbage collection, since they are never garbage."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return, for `--dist loadfile`, a scheduler that gives each worker a file at a time, or a test
    that may run apart from its file, in the order of the collection."""
    if config.option.dist != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False
    scheduler = LoadFileScheduling(config, log)
    scheduler._split_scope = unit_of
    return scheduler


def pytest_sessionfinish() -> None:
    """End the fork server that federations share."""
    end_shared_forks()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs more GPUs than there are: `@pytest.mark.gpu`, or `gpu(count=2)`."""
    wanted = max((mark.kwargs.get("count", 1) for mark in item.iter_markers("gpu")), default=0)
    if wanted and wanted > _gpus():
        pytest.skip(f"GPUs that torch can use (CUDA): {wanted} wanted, {_gpus()} here")


@cache
def _gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
