"""Rules for every metric, and the registry that counts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.repository import ROOT

from metrics_page import metrics_page
from potluck.common.errors import REASONS
from potluck.common.monitoring import definitions as metrics
from potluck.common.monitoring.definitions import (
    METRICS,
    RUN_AWAY_HOST,
    Metric,
    MetricKind,
    metrics_of,
)
from potluck.common.monitoring.instruments import Instruments
from potluck.common.monitoring.metric_labels import OTHER, RUN, MeasuredParty, known_reason
from potluck.common.run_file.run_settings import RoundPolicy
from potluck.server.live.run_metrics import RunObserver
from potluck.server.machine import events as rounds
from potluck.server.machine.machine import Resumption, RoundMachine
from potluck.server.machine.roster import RunRoster
from potluck.server.machine.round_rules import RoundRules
from potluck.server.store.records import (
    AttemptKey,
    MemberState,
    RoundRow,
    RunRow,
    RunState,
)

PAGE = ROOT / "docs/reference/metrics.md"
PER_CLIENT = {"client", "host", "id", "name_of_client", "instruction"}


def samples(instruments: Instruments) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    families = text_string_to_metric_families(instruments.exposition().decode())
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def test_metrics_page_equals_the_generated_one() -> None:
    assert PAGE.read_text() == metrics_page(), "run: make pages"


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_metric_names_follow_the_naming_rules(metric: Metric) -> None:
    assert re.fullmatch(r"potluck_[a-z0-9]+(_[a-z0-9]+)*", metric.name)
    assert metric.name.endswith("_total") == (metric.kind is MetricKind.COUNTER)
    assert metric.help.endswith(".")
    assert metric.unit or metric.kind is not MetricKind.HISTOGRAM
    if metric is not RUN_AWAY_HOST:  # names at most 20 hosts of a run
        assert not PER_CLIENT & {label.name for label in metric.labels}


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_every_metric_label_has_bounded_values(metric: Metric) -> None:
    for label in metric.labels:
        assert label.values or label.about
        if metric.kind is not MetricKind.GAUGE:
            assert label.values, "a counter must begin at 0 under every label"
    if any(not label.values for label in metric.labels):
        unbounded = {label.name for label in metric.labels if not label.values}
        one_each = {"peer", "role"}
        bounded = {"run", "gpu", "measure", "sink", *one_each}
        assert unbounded <= bounded or metric.name.endswith("_info")


def test_metric_names_are_unique() -> None:
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names)) > 50


def test_new_registry_shows_counters_at_zero_and_no_gauges() -> None:
    for party in MeasuredParty:
        shown = samples(Instruments(party))
        names = {name for name, _ in shown}
        for metric in metrics_of(party):
            suffix = "_count" if metric.kind is MetricKind.HISTOGRAM else ""
            expected = metric.kind is not MetricKind.GAUGE or metric in (
                metrics.BUILD_INFO,
                metrics.CLOCK,
            )
            assert (metric.name + suffix in names) == expected, metric.name
        assert not any(name.endswith("_created") for name in names)


def test_counted_and_set_values_are_exposed() -> None:
    instruments = Instruments(MeasuredParty.COORDINATOR)
    instruments.count(metrics.ATTEMPTS, outcome="committed")
    instruments.count(metrics.ATTEMPTS, 2, outcome="committed")
    instruments.set(metrics.ACCURACY, 0.5, run="a")
    instruments.observe(metrics.PHASE_SECONDS, 0.3, phase="train")
    shown = samples(instruments)
    assert shown["potluck_rounds_total", frozenset({("outcome", "committed")})] == 3
    assert shown["potluck_model_accuracy_ratio", frozenset({("run", "a")})] == 0.5
    phase = ("phase", "train")
    assert shown["potluck_round_phase_seconds_sum", frozenset({phase})] == 0.3
    below = "potluck_round_phase_seconds_bucket"
    assert shown[below, frozenset({phase, ("le", "0.25")})] == 0
    assert shown[below, frozenset({phase, ("le", "0.5")})] == 1


def test_removed_run_leaves_no_metric_series() -> None:
    instruments = Instruments(MeasuredParty.COORDINATOR)
    of_runs = [metric for metric in metrics_of(MeasuredParty.COORDINATOR) if RUN in metric.labels]
    for run in ("a", "b"):
        for metric in of_runs:
            values = {label.name: (label.values or ("x",))[0] for label in metric.labels}
            instruments.set(metric, 1, **(values | {"run": run}))
    for metric in of_runs:
        instruments.forget(metric, run="a")
    runs = {dict(labels)["run"] for _, labels in samples(instruments) if "run" in dict(labels)}
    assert runs == {"b"}


def test_gauge_set_to_none_is_removed() -> None:
    instruments = Instruments(MeasuredParty.COORDINATOR)
    instruments.set(metrics.LOSS, 1.0, run="a")
    instruments.set(metrics.LOSS, None, run="a")
    instruments.set(metrics.LOSS, None, run="never set")
    assert not any(name == metrics.LOSS.name for name, _ in samples(instruments))


def test_refresh_functions_run_at_every_exposition() -> None:
    instruments, calls = Instruments(MeasuredParty.HOST), [0]

    def refresh() -> None:
        calls[0] += 1
        instruments.set(metrics.HOST_CLIENTS, calls[0])

    instruments.refresh_with(refresh)
    samples(instruments)
    assert samples(instruments)["potluck_host_clients", frozenset()] == 2


def test_metric_registries_are_independent() -> None:
    first, second = Instruments(MeasuredParty.HOST), Instruments(MeasuredParty.HOST)
    first.count(metrics.RECONNECTS)
    assert samples(second)["potluck_host_reconnects_total", frozenset()] == 0


def test_unknown_failure_reason_becomes_the_label_other() -> None:
    assert "UNREACHABLE" in REASONS
    assert known_reason("UNREACHABLE") == "UNREACHABLE"
    assert known_reason('x"} 1\npotluck_evil 1') == OTHER


# What a run's observer makes of what happens ------------------------------------------------------

TRAINED: list[rounds.Event] = [rounds.Reduced(), rounds.Evaluated(), rounds.Committed()]
ATTEND: list[rounds.Event] = [rounds.Started(), rounds.Joined(("a", "b", "c"))]
TWO_ROUNDS = RoundRules(
    rounds=2,
    clients_per_round=2,
    expected_clients=3,
    start_timeout_seconds=60,
    policy=RoundPolicy(quorum=1.0, attempts=2, over_selection=1),
)


def committed_row(round_number: int) -> RoundRow:
    return RoundRow(
        key=AttemptKey("a", round_number, 1),
        model_blake3="",
        state_blake3=None,
        selector_scalars={},
        strategy_scalars={},
        metrics={},
        seconds=1.0,
        bytes_down=0,
        bytes_up=0,
        committed_at=datetime(2026, 3, 1, tzinfo=UTC),
        members=(),
    )


def counted(
    events: Sequence[rounds.Event], resumption: Resumption | None = None
) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Return (attempts by outcome, members by outcome, phases by name) after these events."""
    instruments = Instruments(MeasuredParty.COORDINATOR)
    observer = RunObserver(instruments, "a", lambda: 0.0)
    machine = RoundMachine(TWO_ROUNDS, resumption)
    if resumption is not None:
        row = committed_row(1)
        begun = RunRow(
            run_id="a", name="", run_file="", created_at=row.committed_at, rounds=2, count=2,
            seed=0, task="", selector="", strategy="", state=RunState.RUNNING, reason="",
            changed_at=row.committed_at, committed_rounds=1, model_blake3=None,
        )  # fmt: skip
        observer.resumed(begun, row, resumption.cohort)
    for now, event in enumerate(events):
        if isinstance(event, rounds.Committed):
            observer.committed(committed_row(machine.round), 0)
        actions = machine.handle(event, 10.0 * now)
        observer.noted(event, actions, machine.phase)
        for action in actions:
            if isinstance(action, rounds.End):
                observer.ended(action.ending, committed_row(1).committed_at)
    shown = samples(instruments)

    def of(metric: str, label: str) -> dict[str, float]:
        found = {dict(labels)[label]: n for (name, labels), n in shown.items() if name == metric}
        return {value: number for value, number in found.items() if number}

    return (
        of("potluck_rounds_total", "outcome"),
        of("potluck_cohort_members_total", "outcome"),
        of("potluck_round_phase_seconds_count", "phase"),
    )


def arrive(*clients: str) -> list[rounds.Event]:
    return [rounds.UpdateArrived(client) for client in clients]


ALL = rounds.Selected(("a", "b", "c"))


def test_finished_run_counts_each_commit_and_no_abandoned_update() -> None:
    one_round: list[rounds.Event] = [ALL, *arrive("a", "c"), *TRAINED]
    attempts, became, phases = counted([*ATTEND, *one_round, *one_round])
    assert attempts == {"committed": 2}
    assert became == {"selected": 6, "answered": 4, "spared": 2}
    assert phases["commit"] == phases["evaluate"] == phases["train"] == 2


def test_missed_quorum_is_counted_once_even_if_the_run_fails() -> None:
    failing: list[rounds.Event] = [
        ALL,
        *arrive("a"),
        *(rounds.ClientFailed(c, "no memory") for c in "bc"),
    ]
    events = [*ATTEND, *failing, rounds.TimerFired(), *failing]
    attempts, became, _ = counted(events)
    assert attempts == {"quorum_missed": 2}
    assert became == {"selected": 6, "answered": 2, "failed": 4}


@pytest.mark.parametrize(
    ("events", "attempts", "became"),
    [
        ([], {}, {}),
        ([*ATTEND], {"abandoned": 1}, {}),
        ([*ATTEND, ALL, *arrive("b")], {"abandoned": 1},
         {"selected": 3, "answered": 1, "abandoned": 2}),
        ([*ATTEND, ALL, *arrive("b", "a"), *TRAINED[:2]], {"abandoned": 1},
         {"selected": 3, "answered": 2, "spared": 1}),
        ([*ATTEND, ALL, *arrive("b", "a"), *TRAINED], {"committed": 1, "abandoned": 1},
         {"selected": 3, "answered": 2, "spared": 1}),
        ([*ATTEND, rounds.StoredAnswersInvalid("others attend")], {"abandoned": 2}, {}),
        ([*ATTEND, rounds.TooFewEligible("no profiles")], {}, {}),
        ([*ATTEND, *[rounds.TimerFired()] * 9, rounds.TooFewEligible("no profiles")], {}, {}),
    ],
    ids=["before", "selecting", "training", "committing", "next", "outdated", "waiting", "late"],
)  # fmt: skip
def test_stopped_run_counts_its_current_attempt_as_abandoned(
    events: Sequence[rounds.Event], attempts: dict[str, float], became: dict[str, float]
) -> None:
    assert counted([*events, rounds.StopRequested()])[:2] == (attempts, became)


def test_member_excluded_from_a_secure_sum_is_counted_only_as_failed() -> None:
    out = rounds.SumFailed(1, 1, "no sum", (("a", "it refuses"),))
    attempts, became, _ = counted([*ATTEND, ALL, *arrive("a"), out, rounds.StopRequested()])
    assert attempts == {"quorum_missed": 1}
    assert became == {"selected": 3, "failed": 1, "abandoned": 2}


def test_restarted_run_counts_its_whole_cohort() -> None:
    stood = Resumption(
        roster=RunRoster("abc"),
        committed=1,
        available=("a", "b", "c"),
        cohort=(
            ("a", MemberState.RECEIVED),
            ("b", MemberState.SELECTED),
            ("c", MemberState.LOST),
        ),
    )
    attempts, became, _ = counted([*ATTEND, *arrive("b"), *TRAINED], stood)
    assert attempts == {"committed": 1}
    assert became == {"selected": 3, "answered": 2, "lost": 1}
