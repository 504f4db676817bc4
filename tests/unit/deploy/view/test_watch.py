"""Runs as a watcher sees them: folded, as lines, as a table, as JSON."""

from __future__ import annotations

import io
import json
import math
from datetime import UTC, datetime, timedelta
from functools import reduce

import pytest
from rich.console import Console
from support.operator_service import (
    NOON,
    Event,
    committed,
    covering,
    member,
    notice,
    progress,
    spread_out,
    status,
    waits,
)

from potluck.common.records.round_message import round_of
from potluck.deploy.operator.json_view import event_values, round_values, to_line
from potluck.deploy.operator.run_view import RunView, fraction_done, is_news, observe, waiting_text
from potluck.deploy.view.listings import client_lines, clients_table, run_table, runs_table
from potluck.deploy.view.readable import (
    readable_bytes,
    readable_count,
    readable_number,
    readable_seconds,
    readable_share,
)
from potluck.deploy.view.watch import JsonDisplay, LinesDisplay, LiveDisplay, pause_seconds
from potluck.deploy.view.watch_lines import cohort_text, round_line
from potluck.deploy.view.watch_table import RunScreen
from potluck.rpc.v1 import operator_pb2
from potluck.rpc.v1.operator_pb2 import MemberState, RunState

TRAINING = MemberState.MEMBER_STATE_TRAINING
LOST = MemberState.MEMBER_STATE_LOST
UPLOADING = MemberState.MEMBER_STATE_UPLOADING


def seen(*events: Event) -> RunView:
    return reduce(observe, events, RunView())


def drawn(view: RunView, *, height: int = 40) -> str:
    screen = RunScreen()
    screen.view = view
    console = Console(file=io.StringIO(), width=100, height=height, force_terminal=False)
    with console.capture() as capture:
        console.print(screen)
    return capture.get()


def squeezed(line: str) -> str:
    return " ".join(line.split())


def test_run_view_contains_all_observed_events() -> None:
    view = seen(status(), progress(1), committed(1, 0.5), progress(2), notice("hello"))
    assert [entry.number for entry in view.rounds] == [1]
    assert view.progress is not None
    assert view.progress.round == 2
    assert [entry.text for entry in view.notices] == ["hello"]
    assert not view.ended
    assert observe(view, status(RunState.RUN_STATE_FINISHED)).ended


def test_repeated_event_after_a_reconnect_is_not_news() -> None:
    events = [status(), committed(1, 0.5), notice("hello")]
    view = seen(*events)
    assert [is_news(view, event) for event in events] == [False, False, False]
    assert is_news(view, committed(2, 0.5))
    assert is_news(view, status(committed=1))


def test_committed_round_is_no_longer_in_progress() -> None:
    assert seen(progress(2), committed(2, 0.5)).progress is None
    assert seen(progress(2), committed(1, 0.5)).progress is not None
    assert seen(progress(2), status(RunState.RUN_STATE_STOPPED)).progress is None


def test_round_progress_is_the_mean_progress_of_its_clients() -> None:
    half = progress(1, "train", member(0, TRAINING, 0.5), member(1, UPLOADING)).progress
    assert fraction_done(half) == 0.75
    lost = progress(1, "train", member(0, TRAINING, 0.5), member(1, LOST)).progress
    assert fraction_done(lost) == 0.75
    assert fraction_done(progress(1).progress) == 0.0


def test_round_line_contains_the_number_of_sums() -> None:
    event = committed(1, 0.5, member(0), member(1))
    event.committed.sums = 2
    assert round_line(round_of(event.committed), status().status).endswith("up 800 kB in 2 sums")


def test_line_display_prints_every_event_once() -> None:
    output = io.StringIO()
    display = LinesDisplay(output)
    view = RunView()
    events = [
        status(),
        progress(1),
        committed(1, 0.5, member(0), member(1, LOST)),
        status(committed=1),
        notice("client-1 was lost"),
        status(RunState.RUN_STATE_FAILED, committed=1, reason="no quorum"),
    ]
    for event in events:
        view = observe(view, event)
        display.show(view, event)
    round_one = (
        "round 1/3  cohort 1/2  loss 0.5000  accuracy 50.0 %  worst group 25.0 %  1.5 s  "
        "down 1.2 MB  up 800 kB"
    )
    assert output.getvalue().splitlines() == [
        "run 3f9ac0de (tea) is running; 0 of 3 rounds committed",
        round_one,
        "warning: client-1 was lost",
        "run 3f9ac0de (tea) failed: no quorum; 1 of 3 rounds committed",
    ]


def test_spared_member_is_not_reported_as_a_failure() -> None:
    spared = committed(1, 0.5, member(0), member(1, MemberState.MEMBER_STATE_SPARED))
    assert cohort_text(round_of(spared.committed)) == "1/2"
    assert fraction_done(progress(1, "train", *spared.committed.members).progress) == 1.0
    assert event_values(spared)["members"][1]["state"] == "spared"


def test_json_display_prints_one_object_per_event_with_protocol_names() -> None:
    output = io.StringIO()
    display = JsonDisplay(output)
    events = [status(), progress(1, "train", member(4, TRAINING, 0.25)), committed(1, 0.5)]
    for event in events:
        display.show(RunView(), event)
    display.connection("gone", lost=True)
    first, second, third, fourth = map(json.loads, output.getvalue().splitlines())
    assert (first["event"], first["run"], first["state"]) == ("status", "3f9ac0de", "running")
    assert second["members"][0]["client"] == "client-4"
    assert second["members"][0]["state"] == "training"
    assert third["accuracy"] == 0.5
    assert third["weighted_f1"] is None
    assert fourth == {"event": "connection", "connected": False, "text": "gone"}


def test_json_display_shows_nan_as_null() -> None:
    event = committed(1, math.nan)
    line = to_line(event_values(event))
    assert json.loads(line)["loss"] is None


def test_live_table_shows_committed_rounds_and_the_current_one() -> None:
    under_way = progress(
        3, "train", member(0, TRAINING, 0.5), member(1, UPLOADING), member(2, LOST)
    )
    view = seen(status(), committed(1, 0.5), committed(2, 0.75), under_way)
    lines = [line.rstrip() for line in drawn(view).splitlines()]
    assert lines[0] == "tea 3f9ac0de  colored-digits · uniform · fedavg · 3 a round  running"
    assert squeezed(lines[1]) == "round cohort loss accuracy worst group time down up"
    assert squeezed(lines[2]) == "1 3 0.5000 50.0 % 25.0 % 1.5 s 1.2 MB 800 kB"
    assert lines[3].split()[:3] == ["2", "3", "0.2500"]
    assert "round 3/3" in lines[4]
    assert lines[5].strip() == "training · 1 training · 1 uploading · 1 lost · 0.4 s"


def test_live_table_shows_the_newest_rounds_that_fit() -> None:
    view = seen(status(rounds=50), *(committed(number, 0.5) for number in range(1, 51)))
    text = drawn(view, height=16)
    assert "42 earlier rounds not shown" in text
    numbers = [line.split()[0] for line in text.splitlines()[2:10]]
    assert numbers == [str(number) for number in range(43, 51)]


def test_live_table_has_no_column_for_a_metric_without_values() -> None:
    event = committed(1, 0.5)
    event.committed.metrics.ClearField("worst_group_accuracy")
    assert "worst group" not in drawn(seen(status(), event))


def test_live_table_shows_the_training_loss_without_evaluations() -> None:
    event = committed(1, 0.5)
    event.committed.metrics.CopyFrom(operator_pb2.Metrics(others={"training_loss": 0.75}))
    view = seen(status(), event)
    lines = [squeezed(line) for line in drawn(view).splitlines()]
    assert lines[1] == "round cohort training loss time down up"
    assert lines[2] == "1 3 0.7500 1.5 s 1.2 MB 800 kB"
    assert "cohort 3 training loss 0.7500 1.5 s" in squeezed(
        round_line(round_of(event.committed), view.status)
    )
    assert "training loss" not in drawn(seen(status(), committed(1, 0.5)))


def test_live_table_has_metric_columns_before_the_first_evaluation() -> None:
    event = committed(1, 0.5)
    event.committed.ClearField("metrics")
    lines = [squeezed(line) for line in drawn(seen(status(), event)).splitlines()]
    assert lines[1:3] == ["round cohort loss accuracy time down up", "1 3 – – 1.5 s 1.2 MB 800 kB"]


def test_waiting_run_shows_the_missing_clients() -> None:
    waiting = waits(status(RunState.RUN_STATE_WAITING))
    until = (NOON + timedelta(minutes=5)).astimezone()
    said = "6 of 9 clients are connected; waiting for 3 more until"
    whom = "disconnected: client-6, client-7, client-8"
    assert waiting_text(waiting.status.waiting, NOON) == f"{said} {until:%H:%M}; {whom}"
    soon = NOON + timedelta(minutes=4)
    assert waiting_text(waiting.status.waiting, soon) == f"{said} {until:%H:%M:%S}; {whom}"
    assert said in drawn(seen(waiting))
    assert said in drawn(seen(progress(1), waiting)), "an attempt that was given up is shown"
    console = Console(file=io.StringIO(), width=240)
    with console.capture() as capture:
        console.print(runs_table([waiting.status], NOON, width=console.width))
    assert f"{said} {until:%H:%M}" in capture.get()
    values = event_values(waiting)["waiting"]
    assert (values["clients"], values["clients_needed"], values["away_count"]) == (6, 9, 3)
    assert values["until"] == "2026-03-01T12:05:00+00:00"
    assert event_values(status())["waiting"] is None


def test_line_display_prints_the_begin_and_the_end_of_waiting() -> None:
    output, view = io.StringIO(), RunView()
    display = LinesDisplay(output)
    moment = waits(status(), clients=9, seconds=3)  # waits 3 s for clients that may reconnect
    lasting = [waits(status(), clients=clients, seconds=None) for clients in (2, 5, 8)]
    for event in [status(), moment, *lasting, status(committed=1)]:
        view = observe(view, event)
        display.show(view, event)
    first, waiting, over = output.getvalue().splitlines()
    assert "2 of 9 clients are connected; waiting for 7 more; disconnected: client-2, " in waiting
    assert "client-6 and 2 more; 0 of 3 rounds committed" in waiting
    assert first.replace("0 of 3", "1 of 3") == over


def test_notices_are_printed_above_the_live_table() -> None:
    output = io.StringIO()
    with LiveDisplay(Console(file=output, width=90, height=30, force_terminal=True)) as display:
        view = seen(status(), notice("[red]client-1[/red] was lost"))
        display.show(view, notice("[red]client-1[/red] was lost"))
        display.connection("lost the coordinator", lost=True)
    text = output.getvalue()
    assert "[red]client-1[/red] was lost" in text
    assert "lost the coordinator" in text


def test_notice_of_before_the_watch_is_shown_with_its_age() -> None:
    lines, table = io.StringIO(), io.StringIO()
    with LiveDisplay(Console(file=table, width=90, height=30, force_terminal=True)) as live:
        for display in (LinesDisplay(lines), live):
            for age in (timedelta(), timedelta(hours=2, seconds=1)):
                event = notice("resumed after round 46", warning=False)
                event.notice.at.FromDatetime(datetime.now(UTC) - age)
                display.show(RunView(), event)
    old = "resumed after round 46 (2 h 00 min ago)"
    assert lines.getvalue().splitlines() == ["resumed after round 46", old]
    assert old in table.getvalue()


def test_best_model_is_shown_with_its_clients_and_samples() -> None:
    run = status(RunState.RUN_STATE_FINISHED, committed=7)
    run.status.best.CopyFrom(
        operator_pb2.BestModel(measure="loss", round=4, value=0.25, model_blake3="ab", stalled=3)
    )
    run.status.best.coverage.CopyFrom(
        operator_pb2.Coverage(clients=6, asked=7, samples=240, partial=False)
    )

    def shown() -> str:
        console = Console(file=io.StringIO(), width=160)
        with console.capture() as capture:
            console.print(run_table(run.status, NOON))
        return squeezed(capture.get())

    rest = ", 3 evaluations without improvement since: ab"
    assert f"best round 4, loss 0.25 over 6 of 7 clients, 240 samples{rest}" in shown()
    assert event_values(run)["best"]["coverage"] == {
        "clients": 6,
        "asked": 7,
        "samples": 240,
        "partial": False,
    }
    run.status.best.ClearField("coverage")  # a coordinator of an older release
    assert f"best round 4, loss 0.25{rest}" in shown()
    assert event_values(run)["best"]["coverage"] is None


def test_listings_show_markup_in_names_literally() -> None:
    console = Console(file=io.StringIO(), width=160)
    run = status(RunState.RUN_STATE_STOPPED, committed=1, reason="by [bold]me[/bold]").status
    clients = [
        operator_pb2.ClientStatus(client_id=f"client-{number}", host_id="host-0", device="cpu")
        for number in (0, 10, 2)
    ]
    now = datetime(1970, 1, 1, 0, 0, 12, tzinfo=UTC)
    with console.capture() as capture:
        console.print(runs_table([run], now, width=160))
        console.print(clients_table(clients, now))
    text = capture.get()
    assert "by [bold]me[/bold]" in text
    lines = [squeezed(line) for line in text.splitlines()[-3:]]
    assert lines == [
        f"client-{number} host-0 disconnected 12 s ago cpu 0 0" for number in (0, 2, 10)
    ]
    plain = list(client_lines(clients, now))  # used if a table would take long
    assert [squeezed(line) for line in plain[1:]] == lines
    assert plain[0].split() == [
        "client",
        "host",
        "state",
        "heard",
        "of",
        "device",
        "selected",
        "included",
    ]
    clients[1].tags["site"] = "north"
    heading, *_, tagged = client_lines(clients, now)
    assert heading.split()[5:] == ["device", "tags", "selected", "included"]
    assert tagged.split() == ["client-10", *lines[2].split()[1:-2], "site=north", "0", "0"]
    assert len({line.index("host") for line in plain}) == 1


@pytest.mark.parametrize(
    ("attempt", "seconds"), [(1, 0.25), (2, 0.5), (5, 4.0), (6, 5.0), (10_000, 5.0)]
)
def test_reconnect_pause_doubles_up_to_the_maximum(attempt: int, seconds: float) -> None:
    assert pause_seconds(attempt) == seconds


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (9_949, "9.9 kB"),
        (9_951, "10 kB"),
        (999_500, "1.0 MB"),
        (45_431_440, "45 MB"),
        (3 * 10**15, "3.0 PB"),
        (10**18, "1000 PB"),
    ],
)
def test_byte_counts_are_formatted_with_units(count: int, text: str) -> None:
    assert readable_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (9.9, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (185, "3 min 05 s"),
        (7620, "2 h 07 min"),
        (86_400 * 3 + 4 * 3600, "3 d 04 h"),
    ],
)
def test_durations_are_formatted_with_units(seconds: float, text: str) -> None:
    assert readable_seconds(seconds) == text


def test_shares_numbers_and_counts_are_formatted_for_display() -> None:
    assert [readable_share(share) for share in (0.9304, 1.0, None, math.nan)] == [
        "93.0 %",
        "100.0 %",
        "–",
        "–",
    ]
    assert [readable_number(value) for value in (0.17814, 1.5, 1234.0, None)] == [
        "0.1781",
        "1.500",
        "1234",
        "–",
    ]
    assert [readable_count(count, "round") for count in (1, 2)] == ["1 round", "2 rounds"]


def test_metrics_over_some_of_the_clients_are_marked_as_partial() -> None:
    whole = covering(committed(1, 0.5), 6, 6, 240, partial=False)
    partial = covering(committed(2, 0.9), 3, 6, 120, partial=True)
    view = seen(status(), whole, partial)
    lines = [squeezed(line) for line in drawn(view).splitlines()]
    assert any(line.startswith("1 3 0.5000 50.0 % 25.0 % 6 240 ") for line in lines)
    assert any(line.startswith("2 3 0.1000* 90.0 %* 45.0 %* 3/6 120 ") for line in lines)
    assert any("* partial: over fewer of the clients asked than" in line for line in lines)
    one, other = (round_line(each, view.status) for each in view.rounds)
    assert "accuracy 50.0 %  worst group 25.0 %  over 6 clients, 240 samples  1.5 s" in one
    assert "worst group 45.0 %  over 3 of 6 clients, 120 samples, partial  1.5 s" in other
    assert event_values(partial)["coverage"]["accuracy"] == {
        "clients": 3,
        "asked": 6,
        "samples": 120,
        "partial": True,
    }


def test_a_spread_over_some_of_the_clients_is_marked_as_partial() -> None:
    event = spread_out(committed(1, 0.5))
    event.committed.spreads["accuracy"].asked = 15
    event.committed.spreads["accuracy"].partial = True
    view = seen(status(), event)
    assert "10.0 %*" in drawn(view)
    line = round_line(round_of(event.committed), view.status)
    assert "worst tenth 10.0 % of 12 of 15 clients, partial" in line


def test_metrics_that_no_client_measured_are_shown_as_missing() -> None:
    event = covering(committed(1, 0.5), 0, 6, 0, partial=True)
    event.committed.ClearField("metrics")
    view = seen(status(), event)
    assert "loss –  accuracy –  worst group –  over 0 of 6 clients, partial" in round_line(
        round_of(event.committed), view.status
    )
    assert any(squeezed(line).startswith("1 3 – – – 0/6 ") for line in drawn(view).splitlines())


def test_metrics_on_coordinator_data_show_their_sample_count() -> None:
    event = covering(committed(1, 0.5), 0, 0, 360, partial=False)
    view = seen(status(), event)
    assert "over 360 samples  1.5 s" in round_line(round_of(event.committed), view.status)
    [head] = [line for line in map(squeezed, drawn(view).splitlines()) if line.startswith("round ")]
    assert "samples" in head
    assert "clients" not in head


def test_spread_over_clients_is_shown_if_known() -> None:
    view = seen(status(), committed(1, 0.5), spread_out(committed(2, 0.75)))
    lines = [squeezed(line) for line in drawn(view).splitlines()]
    [head] = [line for line in lines if line.startswith("round ")]
    assert "worst tenth" in head
    assert any(line.startswith("1 ") and " – " in line for line in lines)
    assert any(line.startswith("2 ") and " 10.0 % " in line for line in lines)
    assert "worst tenth" not in drawn(seen(status(), committed(1, 0.5)))
    line = round_line(view.committed[2], view.status)
    assert "worst tenth 10.0 % of 12 clients" in line
    [_, after] = [round_values(each) for each in view.rounds]
    assert after["spreads"]["accuracy"] == {
        "clients": 12,
        "asked": 12,
        "samples": 0,
        "partial": False,
        "mean": 0.5,
        "worst_tenth": 0.1,
        "quantiles": {"0.1": 0.2, "0.25": 0.3, "0.5": 0.5, "0.75": 0.7, "0.9": 0.9},
    }
