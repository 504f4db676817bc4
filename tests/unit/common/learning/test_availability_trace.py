"""Availability traces: their CSV text, and speed and availability at a time."""

import hashlib
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.common.errors import ConfigurationError
from potluck.common.learning.availability_trace import (
    AvailabilityTrace,
    TraceSpan,
    parse_trace,
    read_trace,
    trace_text,
)

HEADER = "client,start,end,speed\n"


@st.composite
def spans(draw: st.DrawFn) -> list[TraceSpan]:
    """Draw spans of a client on a grid of half seconds, with or without gaps."""
    marks = sorted(draw(st.sets(st.integers(0, 40), min_size=2, max_size=9)))
    found: list[TraceSpan] = []
    for start, end in pairwise(marks):
        if draw(st.booleans()) or not found:
            speed = draw(st.sampled_from([0.5, 1.0, 3.25]))
            found.append(TraceSpan(start / 2, end / 2, speed))
    return found


traces = st.dictionaries(
    st.sampled_from(["client-0", "client-1", "phone.7"]), spans(), min_size=1
).map(AvailabilityTrace.of)


@given(traces)
def test_written_trace_is_read_back_unchanged(trace: AvailabilityTrace) -> None:
    assert parse_trace(trace_text(trace.spans), source="t.csv") == trace


@given(traces, st.integers(0, 200).map(lambda k: k / 4))
def test_trace_speed_is_that_of_the_row_at_a_time_and_repeats_by_period(
    trace: AvailabilityTrace, at: float
) -> None:
    for client, own in trace.spans.items():
        place = at % trace.period
        around = [span.speed for span in own if span.start <= place < span.end]
        assert trace.speed(client, at) == (around[0] if around else 0.0)
        assert trace.speed(client, at + trace.period) == trace.speed(client, at)


@given(traces, st.integers(0, 100).map(lambda k: k / 4), st.integers(1, 3))
def test_next_time_of_a_trace_is_the_first_with_enough_available_clients(
    trace: AvailabilityTrace, at: float, count: int
) -> None:
    """The spans' grid has steps of half a second, so the reference checks each quarter of a
    second."""
    clients = list(trace.spans)
    steps = range(int(trace.period * 4) + 1)
    enough = [
        at + step / 4
        for step in steps
        if sum(trace.speed(client, at + step / 4) > 0 for client in clients) >= count
    ]
    assert trace.next_time(clients, at, count) == (enough[0] if enough else None)


@given(traces, st.integers(0, 60).map(lambda k: k / 4), st.integers(1, 120))
def test_client_stays_available_only_if_its_rows_cover_the_whole_duration(
    trace: AvailabilityTrace, at: float, quarters: int
) -> None:
    for client in trace.spans:
        there = all(trace.speed(client, at + step / 4) > 0 for step in range(quarters))
        assert trace.stays(client, at, quarters / 4) == there


def test_trace_states_available_and_unavailable_are_speeds_1_and_0() -> None:
    text = "client,start,end,state\na,0,10,available\na,10,20,unavailable\nb,5,20,available\n"
    trace = parse_trace(text, source="t.csv")
    assert [trace.speed("a", at) for at in (0.0, 9.5, 10.0)] == [1.0, 1.0, 0.0]
    assert trace.next_time(["a", "b"], 0.0, 2) == 5.0
    assert trace.next_time(["a", "b"], 12.0, 2) == 25.0


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "t.csv, line 1: the column names are ''; write 'client,start,end,speed' or"),
        (
            "client,begin,end,speed\n",
            "line 1: the column names are 'client,begin,end,speed'; write",
        ),
        (HEADER, "t.csv: no client is ever available; add a row such as client-0,0,3600,1.0"),
        (HEADER + "a,0,9,0\n", "no client is ever available"),
        (
            HEADER + "a,0,9\n",
            "line 2: the row 'a,0,9' has 3 values; write four: client,start,end,speed",
        ),
        (HEADER + "a,0,9,1\n\n", "line 3: the row '' has 0 values"),
        (HEADER + "A b,0,9,1\n", "line 2: 'client' is 'A b', which is not a client id; use lower"),
        (HEADER + "a,now,9,1\n", "line 2: 'start' is 'now'; write seconds since the start"),
        (HEADER + "a,-1,9,1\n", "line 2: 'start' is '-1'; write seconds"),
        (HEADER + "a,0,inf,1\n", "line 2: 'end' is 'inf'; write seconds"),
        (HEADER + "a,0, 9,1\n", "line 2: 'end' is ' 9'; write seconds"),
        (HEADER + "a,9,9,1\n", "line 2: 'end' is 9, but 'start' is 9; write an end that"),
        (HEADER + "a,0,9,fast\n", "line 2: 'speed' is 'fast'; write a number ≥ 0"),
        (
            HEADER + "a,0,9,1\nb,0,9,1\na,8,12,1\n",
            "line 4: 'start' is 8, but the row before of client 'a'",
        ),
        (HEADER + 'a,0,"9,1\n', "not valid CSV: .*; write four values without quotes"),
        ("client,start,end,state\na,0,9,on\n", "'state' is 'on'; write 'available' or"),
    ],
)
def test_invalid_trace_is_refused_with_line_value_and_remedy(text: str, error: str) -> None:
    with pytest.raises(ConfigurationError, match=error):
        parse_trace(text, source="t.csv")


def test_trace_from_the_data_directory_is_refused_if_its_digest_differs(
    tmp_path: Path,
) -> None:
    text = HEADER + "a,0,9,1\n"
    (tmp_path / "t.csv").write_text(text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert read_trace("t.csv", tmp_path, sha256=digest).period == 9.0
    with pytest.raises(ConfigurationError, match=rf"SHA-256 {digest}.*is {'0' * 64}; restore"):
        read_trace("t.csv", tmp_path, sha256="0" * 64)
    with pytest.raises(ConfigurationError, match=r"can't read the trace .*No such file"):
        read_trace("u.csv", tmp_path)
    with pytest.raises(ConfigurationError, match="outside the coordinator's data directory"):
        read_trace("../t.csv", tmp_path / "data")
    with pytest.raises(ConfigurationError, match="has no data directory"):
        read_trace("t.csv", None)
    (tmp_path / "t.csv").write_bytes(b"\xff")
    with pytest.raises(ConfigurationError, match=r"not UTF-8 text \(byte 0\)"):
        read_trace("t.csv", tmp_path)
