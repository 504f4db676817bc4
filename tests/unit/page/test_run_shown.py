"""The web UI's view of a run follows from the run's operator events."""

from datetime import UTC, datetime

import pytest
from support.operator_service import (
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
from potluck.deploy.operator.run_view import RunView, observe
from potluck.deploy.view.run_summary import CoverageSummary
from potluck.page.run_shown import (
    ClientList,
    changed_cohort,
    shown_details,
    shown_live,
    shown_run,
    stragglers,
)
from potluck.rpc.v1 import operator_pb2
from potluck.rpc.v1.operator_pb2 import MemberState, RunState

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
TRAINING = MemberState.MEMBER_STATE_TRAINING
LOST = MemberState.MEMBER_STATE_LOST


def seen(*events: Event) -> RunView:
    view = RunView()
    for event in events:
        view = observe(view, event)
    return view


def test_run_is_shown_after_its_first_event() -> None:
    assert shown_run(RunView(), ClientList(), NOW) is None
    found = shown_run(seen(status(), notice("host-0 left")), ClientList(), NOW)
    assert found is not None
    assert (found.status.name, found.status.state, found.status.can_stop) == (
        "tea",
        "running",
        True,
    )
    assert [each.name for each in found.measures] == ["loss", "accuracy"]  # no round is committed
    assert [(each.warning, each.text) for each in found.notices] == [(True, "host-0 left")]
    assert (found.rounds, found.live, found.cohort) == ([], None, None)


@pytest.mark.parametrize(
    ("state", "stop", "resume"),
    [
        (RunState.RUN_STATE_WAITING, True, False),
        (RunState.RUN_STATE_RUNNING, True, False),
        (RunState.RUN_STATE_FINISHED, False, False),
        (RunState.RUN_STATE_STOPPED, False, True),
        (RunState.RUN_STATE_FAILED, False, True),
    ],
)
def test_stop_and_resume_are_shown_only_in_states_that_allow_them(
    state: RunState.ValueType, stop: bool, resume: bool
) -> None:
    found = shown_run(seen(status(state, reason="why")), ClientList(), NOW)
    assert found is not None
    assert (found.status.can_stop, found.status.can_resume) == (stop, resume)
    assert found.status.why == "why"


def test_waiting_run_shows_the_missing_clients() -> None:
    found = shown_run(seen(waits(status(RunState.RUN_STATE_WAITING))), ClientList(), NOW)
    assert found is not None
    assert found.status.why.startswith("6 of 9 clients are connected; waiting for 3 more until ")
    assert found.status.why.endswith("; disconnected: client-6, client-7, client-8")


def test_cohorts_refer_to_an_append_only_client_list() -> None:
    clients = ClientList()
    view = seen(
        status(committed=2),
        committed(1, 0.5, member(4), member(2, LOST)),
        covering(spread_out(committed(2, 0.7, member(2), member(9))), 3, 6, 120, partial=True),
    )
    found = shown_run(view, clients, NOW)
    assert found is not None
    assert found.clients == ["client-4", "client-2", "client-9"]
    first, second = found.rounds
    assert (first.cohort, first.left_out) == ([0, 1], [1])
    assert (second.cohort, second.left_out) == ([1, 2], [])
    assert (second.values["accuracy"], second.worst_tenth) == (0.7, {"accuracy": 0.1})
    assert second.coverage["loss"] == CoverageSummary(clients=3, asked=6, samples=120, partial=True)
    assert second.spread_coverage["accuracy"].asked == 12
    assert [each.name for each in found.measures] == ["loss", "accuracy", "worst_group_accuracy"]
    assert clients.since(2) == ["client-9"]


def test_current_round_shows_the_state_of_each_client() -> None:
    event = progress(3, "train", member(0, TRAINING, 0.456), member(1, LOST), member(2))
    event.progress.members[1].trouble = "host-0 went away"
    event.progress.bytes_down = 1200
    found = shown_live(event.progress)
    assert (found.round, found.phase, found.bytes_down) == (3, "training", 1200)
    assert (found.states, found.fractions) == (["training", "lost", "included"], [0.46, 0.0, 1.0])
    assert found.troubles == {1: "host-0 went away"}
    assert [(each.state, each.clients, each.troubled) for each in found.counts] == [
        ("training", 1, False),
        ("included", 1, False),
        ("lost", 1, True),
    ]
    assert found.done == pytest.approx(2.456 / 3, abs=1e-3)


def test_straggler_takes_1_5_times_the_median_duration_of_finished_clients() -> None:
    event = progress(1, "train", member(0), member(1), member(2, TRAINING, 0.2), member(3, LOST))
    event.progress.members[0].seconds, event.progress.members[1].seconds = 2.0, 4.0
    for seconds, expected in [(4.4, []), (4.6, [2])]:
        event.progress.seconds = seconds
        assert stragglers(event.progress) == expected
    event.progress.members[1].seconds = 0.0  # less than half have finished
    event.progress.seconds = 100.0
    assert stragglers(event.progress) == []


def test_web_ui_receives_a_cohort_only_if_it_changed() -> None:
    first, later = progress(1, "select").progress, progress(1, "train", member(0)).progress
    assert changed_cohort(None, first)
    assert changed_cohort(first, later)
    assert not changed_cohort(later, progress(1, "reduce", member(0)).progress)
    again = operator_pb2.RoundProgress(round=1, attempt=2, members=[member(0)])
    assert changed_cohort(later, again)


def test_round_details_contain_the_reason_of_each_selection() -> None:
    [found] = shown_details(round_of(committed(1, 0.5, member(7, LOST)).committed)).members
    assert (found.client, found.reason, found.state) == ("client-7", "uniform", "lost")
