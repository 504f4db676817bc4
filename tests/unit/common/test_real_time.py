"""Any duration from another machine becomes a usable number of seconds."""

from __future__ import annotations

import pytest
from google.protobuf.duration_pb2 import Duration
from hypothesis import given
from hypothesis import strategies as st

from potluck.common.real_time import YEAR_SECONDS, seconds_of


@given(st.integers(-(2**63), 2**63 - 1), st.integers(-(2**31), 2**31 - 1))
def test_seconds_of_any_duration_are_between_zero_and_a_year(seconds: int, nanos: int) -> None:
    assert 0 <= seconds_of(Duration(seconds=seconds, nanos=nanos)) <= YEAR_SECONDS


@pytest.mark.parametrize(
    ("seconds", "nanos", "found"),
    [
        (0, 50_000_000, 0.05),
        (90, 500_000_000, 90.5),
        (31_536_000, 0, 31_536_000.0),
        (10**14, 0, 31_536_000.0),
        (-1, -500_000_000, 0.0),
    ],
)
def test_seconds_of_a_duration_are_limited(seconds: int, nanos: int, found: float) -> None:
    assert seconds_of(Duration(seconds=seconds, nanos=nanos)) == found
