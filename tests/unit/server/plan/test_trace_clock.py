"""The simulated time of a run with a trace: waits, speeds, clients that become unavailable."""

import math
from pathlib import Path

import pytest

from potluck.common.errors import ConfigurationError, RunError
from potluck.common.learning.availability_trace import parse_trace
from potluck.common.learning.virtual_clock import VirtualClock
from potluck.server.plan.plan import draw_up
from potluck.server.plan.trace_clock import TraceClock, trace_clock

TRACE = "client,start,end,speed\na,0,10,1\na,100,130,2\nb,20,110,4\nc,105,400,0.5\n"


def clock() -> TraceClock:
    return TraceClock(trace=parse_trace(TRACE, source="t.csv"), deadline=50.0)


def test_attempt_on_a_trace_clock_starts_when_enough_clients_are_available() -> None:
    time = clock()
    assert time.begin("abc", 1, failed=0) == ["a"]
    assert time.begin("abc", 2, failed=0) == ["a", "b"]
    assert (time.begun, time.seconds(7.0)) == (100.0, 107.0)
    assert [time.speed(client) for client in "ab"] == [2.0, 4.0]
    assert [time.arrival("b", seconds) for seconds in (10.0, 10.5)] == [10.0, math.inf]


def test_commits_and_failed_attempts_advance_the_trace_clock() -> None:
    time = clock()
    time.begin("abc", 1, failed=0)
    time.commit(time.seconds(12.0))
    assert time.begin("abc", 1, failed=0) == ["b"]
    assert (time.passed, time.begun) == (12.0, 20.0)
    assert time.begin("abc", 1, failed=1) == ["b"]
    assert time.begun == 70.0
    assert time.begin("abc", 1, failed=1) == ["b"]  # again, for instance after a restart
    assert time.begun == 70.0
    assert time.begin("abc", 1, failed=2) == ["a", "c"]
    assert time.begun == 120.0


def test_attempt_after_a_wait_begins_a_deadline_later_than_the_failed_one() -> None:
    """The first attempt waits until 1000; its retries don't start from 0."""
    text = "client,start,end,speed\na,1000,1060,1\na,2000,3000,1\nb,1000,1060,1\nb,2000,3000,1\n"
    time = TraceClock(trace=parse_trace(text, source="t.csv"), deadline=100.0)
    time.begin("ab", 2, failed=0)
    assert (time.begun, time.arrival("a", 80.0)) == (1000.0, math.inf)
    time.begin("ab", 2, failed=1)
    assert (time.begun, time.arrival("a", 80.0)) == (2000.0, 80.0)
    assert time.seconds(80.0) == 2080.0


def test_clients_that_are_never_available_together_are_known() -> None:
    trace = parse_trace("client,start,end,speed\na,0,10,1\nb,20,30,1\nc,5,25,1\n", source="t.csv")
    time = TraceClock(trace=trace, deadline=50.0)
    assert time.ever("ac", 2)
    assert time.ever("abc", 2)
    assert not time.ever("ab", 2)


def test_client_missing_from_the_trace_or_unreachable_client_count_is_refused() -> None:
    with pytest.raises(
        RunError, match="has no row of client x and of 1 other clients of the run; add"
    ):
        clock().begin(["a", "x", "y"], 1, failed=0)
    with pytest.raises(
        RunError, match=r"never has 4 of the 3 clients available at the same time; lower"
    ):
        clock().begin("abc", 4, failed=0)


def test_run_has_a_trace_clock_only_if_the_clock_is_enabled_with_a_trace(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(TRACE)
    on = VirtualClock(enabled=True, trace="t.csv", deadline_seconds=50)
    assert trace_clock(on, tmp_path) == clock()
    assert trace_clock(on.model_copy(update={"enabled": False}), tmp_path) is None
    assert trace_clock(on.without_trace(), tmp_path) is None


def test_trace_without_a_deadline_or_with_late_updates_is_refused() -> None:
    text = '[task]\nname = "digits"\n[virtual_clock]\nenabled = true\ntrace = "t.csv"\n'
    with pytest.raises(ConfigurationError, match="`trace` needs `deadline_seconds`"):
        draw_up(text, source="test")
    text += "deadline_seconds = 50\n"
    assert draw_up(text, source="test").run_file.virtual_clock.trace == "t.csv"
    with pytest.raises(ConfigurationError, match=r"virtual_clock\.trace: a client that misses"):
        draw_up(text + "[round.late_updates]\nrounds = 1\n", source="test")
