"""Devices on which each test runs: always the CPU, and a GPU if there is one."""

from __future__ import annotations

from typing import cast

import pytest

GPU = pytest.param("cuda:0", marks=pytest.mark.gpu)
TWO_GPUS = pytest.param(("cuda:0", "cuda:1"), marks=pytest.mark.gpu(count=2))


@pytest.fixture(params=["cpu", GPU])
def device(request: pytest.FixtureRequest) -> str:
    """Return a device, as named in a host's settings."""
    return cast(str, request.param)


@pytest.fixture(params=[("cpu", "cpu"), TWO_GPUS])
def devices(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Return two devices of a host."""
    return cast(tuple[str, str], request.param)
