"""Generated traces, and traces converted from FedScale's format."""

import json
import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from potluck.common.errors import ConfigurationError
from potluck.common.learning.availability_trace import (
    AvailabilityTrace,
    parse_trace,
    read_trace_file,
    trace_text,
)
from potluck.experiments.commands.traces_commands import app
from potluck.experiments.traces.diurnal import DAY, Diurnal, diurnal_trace
from potluck.experiments.traces.fedscale import fedscale_trace, read_devices

NIGHT = {"duration": 90, "active": [10, 60], "inactive": [40, 90], "finish_time": 100, "model": "x"}
BRIEF = {"duration": 5, "active": [0], "inactive": [5], "finish_time": 30, "model": "y"}


def available(trace: AvailabilityTrace) -> dict[str, list[tuple[float, float]]]:
    """Return begin and end of each period in which a client is available, by client."""
    return {
        client: [(span.start, span.end) for span in own if span.speed > 0]
        for client, own in trace.spans.items()
    }


@given(
    st.builds(
        Diurnal,
        clients=st.integers(1, 6),
        days=st.integers(1, 4),
        seed=st.integers(0, 99),
        hours=st.floats(0.5, 24),
        spread=st.floats(0, 12),
        zones=st.integers(1, 24),
        skipped=st.floats(0, 0.5),
        speed_spread=st.floats(0, 3),
    )
)
@settings(max_examples=50)
def test_generated_trace_is_reproducible_and_read_back_unchanged(of: Diurnal) -> None:
    trace = diurnal_trace(of)
    assert diurnal_trace(of) == trace
    assert trace.period == of.days * DAY
    if any(span.speed > 0 for own in trace.spans.values() for span in own):
        assert parse_trace(trace_text(trace.spans), source="t.csv") == trace


def test_generated_trace_of_a_client_is_independent_of_the_population_size() -> None:
    few, many = (available(diurnal_trace(Diurnal(clients=count, zones=4))) for count in (3, 30))
    assert {client: many[client] for client in few} == few


def test_generated_nights_start_at_ten_in_the_evening_of_the_time_zone() -> None:
    """The last night of the zone without an offset continues at the start of the trace."""
    trace = diurnal_trace(Diurnal(clients=400, days=2, spread=0.0, zones=2, skipped=0.0))
    hours = {
        tuple((start / 3600, end / 3600) for start, end in own) for own in available(trace).values()
    }
    assert hours == {((0, 6), (22, 30), (46, 48)), ((10, 18), (34, 42))}


@pytest.mark.parametrize("days", [1, 2, 7])
@pytest.mark.parametrize("zones", [1, 4, 24])
def test_generated_clients_are_available_in_eight_hours_of_nine_nights_in_ten(
    zones: int, days: int
) -> None:
    """At spread 1, nights of zone 2 of 24 begin before or after midnight with equal probability."""
    trace = diurnal_trace(Diurnal(clients=1000, days=days, zones=zones))
    shares = [
        sum(end - start for start, end in own) / (days * DAY) for own in available(trace).values()
    ]
    assert sum(shares) / 1000 == pytest.approx(0.9 * 8 / 24, rel=0.05)


def test_overlapping_generated_nights_are_merged() -> None:
    trace = diurnal_trace(Diurnal(clients=3, days=2, hours=24.0, spread=0.0, skipped=0.0))
    assert list(available(trace).values()) == 3 * [[(0, 2 * DAY)]]


@pytest.mark.parametrize("form", ["pickle", "json"])
def test_fedscale_entries_become_clients_in_file_order_and_repeat(
    tmp_path: Path, form: str
) -> None:
    path, entries = tmp_path / "client_behave_trace", {1: NIGHT, 2: BRIEF}
    path.write_bytes(pickle.dumps(entries) if form == "pickle" else json.dumps(entries).encode())
    trace = fedscale_trace(read_devices(path), clients=3)
    assert available(trace) == {
        "client-0": [(10, 40), (60, 90)],
        "client-1": [(0, 5), (30, 35), (60, 65), (90, 95)],
        "client-2": [(10, 40), (60, 90)],
    }
    assert trace.period == 100.0


def test_fedscale_capacities_become_samples_per_second() -> None:
    """In FedScale, training on a sample takes three times as long as inference, which is given in
    milliseconds."""
    devices = {"a": {"computation": 100.0, "communication": 5648.1}}
    trace = fedscale_trace({1: BRIEF}, devices, clients=1, seconds=40)
    assert available(trace) == {"client-0": [(0, 5), (30, 35)]}
    assert trace.speed("client-0", 31.0) == pytest.approx(10 / 3)
    assert trace.period == 40.0


@given(
    begins=st.lists(st.integers(-5, 60), max_size=6),
    lengths=st.lists(st.integers(-3, 20), min_size=6, max_size=6),
    finish=st.integers(1, 50),
    at=st.integers(0, 99),
)
def test_converted_client_is_available_as_in_its_fedscale_entry(
    begins: list[int], lengths: list[int], finish: int, at: int
) -> None:
    ends = [begin + length for begin, length in zip(begins, lengths, strict=False)]
    entry = {"active": begins, "inactive": ends, "finish_time": finish}
    trace = fedscale_trace({7: entry}, clients=1, seconds=100)
    place = at % finish
    there = any(begin <= place < end for begin, end in zip(begins, ends, strict=True))
    assert (trace.speed("client-0", at) > 0) == there


@pytest.mark.parametrize(
    ("entry", "error"),
    [
        ({**NIGHT, "active": [1]}, "1 times in 'active' and 2 in 'inactive'.*remove the entry"),
        ({**NIGHT, "active": "no"}, "no list of numbers 'active'"),
        ({**NIGHT, "finish_time": 0}, "has 0 as 'finish_time', but must have a number above 0"),
        ([1, 2], "has None as 'finish_time'"),
    ],
)
def test_invalid_fedscale_entry_is_refused(entry: object, error: str) -> None:
    with pytest.raises(ConfigurationError, match=f"the trace: 5 (has )?{error}"):
        fedscale_trace({5: entry}, clients=1)


def test_fedscale_pickle_that_could_execute_code_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(pickle.dumps({1: Path("/")}))
    with pytest.raises(ConfigurationError, match=r"not a pickle of plain dicts.*pathlib"):
        read_devices(path)
    path.write_bytes(pickle.dumps([1]))
    with pytest.raises(ConfigurationError, match="contains a list, not a dict"):
        read_devices(path)
    path.write_bytes(b"nothing")
    with pytest.raises(ConfigurationError, match="download FedScale's file again"):
        read_devices(path)
    with pytest.raises(ConfigurationError, match="No such file"):
        read_devices(tmp_path / "none")


def test_trace_commands_write_traces_and_print_their_digest(tmp_path: Path) -> None:
    source, target = tmp_path / "behave", tmp_path / "data" / "t.csv"
    source.write_bytes(pickle.dumps({1: NIGHT}))
    run = CliRunner()
    night = ["diurnal", "--clients", "5", "--days", "2", "--seed", "3", "--to", str(target)]
    first, second = run.invoke(app, night), run.invoke(app, night)
    assert first.exit_code == 0, first.output
    assert first.output == second.output == run.invoke(app, ["check", str(target)]).output
    assert "5 clients" in first.output
    done = run.invoke(app, ["fedscale", str(source), "--clients", "2", "--to", str(target)])
    assert "2 clients, 5 rows, repeats after 100 s" in done.output
    assert read_trace_file(target).speed("client-1", 15.0) == 1.0


def test_trace_without_an_available_client_is_refused_and_not_written(tmp_path: Path) -> None:
    source, target = tmp_path / "behave", tmp_path / "t.csv"
    source.write_bytes(pickle.dumps({1: NIGHT}))
    short = ["fedscale", str(source), "--clients", "1", "--seconds", "5", "--to", str(target)]
    done = CliRunner().invoke(app, short)
    assert isinstance(done.exception, ConfigurationError)
    assert "no client is available in the 5 s of the trace" in str(done.exception)
    assert not target.exists()
