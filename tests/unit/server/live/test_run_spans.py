"""Spans of failed rounds; spans of successful ones are tested with a federation."""

from __future__ import annotations

import time
from collections import Counter

from support.collector import running_collector
from support.stored import AT, RUN

from potluck.common.tracing import TracingSettings, open_tracer
from potluck.server.live.run_spans import RunSpans
from potluck.server.machine import events as rounds
from potluck.server.machine.machine import Phase
from potluck.server.store.records import MemberState, RunRow, RunState

ROW = RunRow(
    **vars(RUN),
    state=RunState.RUNNING,
    reason="",
    changed_at=AT,
    committed_rounds=0,
    model_blake3=None,
)


def test_client_spans_hide_training_durations_if_all_have_equal_lengths() -> None:
    with running_collector() as collector:
        settings = TracingSettings(endpoint=f"http://127.0.0.1:{collector.port}")
        tracer = open_tracer(settings, "potluck-coordinator")
        assert tracer is not None
        spans = RunSpans(tracer, ROW, alike=True)
        for attempt in (1, 2):
            key = (1, attempt)
            chosen = [rounds.Train(client) for client in "abc"]
            spans.noted(rounds.Selected(("a", "b", "c")), chosen, Phase.TRAINING, key)
            assert spans.context_of("a") == ""
            spans.noted(rounds.UpdateArrived("a"), [], Phase.TRAINING, key)
            lost = rounds.MarkMember(1, attempt, "b", MemberState.LOST, "gone")
            failing = [lost] if attempt == 1 else []
            spans.noted(rounds.Left(("b",)), failing, Phase.TRAINING, key)
            last = time.time_ns()
            spans.noted(rounds.UpdateArrived("c"), [], Phase.REDUCING, key)
            spans.noted(rounds.UpdateArrived("c"), [*failing], Phase.COMMITTING, key)
        spans.close()
        tracer.close()
    clients = [each for each in collector.spans if each.name == "client"]
    [second] = [each for each in collector.spans if each.attributes.get("potluck.attempt") == 2]
    of_second = [each for each in clients if each.trace == second.trace]
    assert len(of_second) == 3
    assert all(each.end >= last for each in of_second)
    failed = [each.attributes["potluck.client"] for each in clients if each.failed]
    assert failed == ["b"]  # b failed in the first attempt


def test_span_of_an_abandoned_attempt_ends_with_the_reason() -> None:
    with running_collector() as collector:
        settings = TracingSettings(endpoint=f"http://127.0.0.1:{collector.port}")
        tracer = open_tracer(settings, "potluck-coordinator")
        assert tracer is not None
        spans = RunSpans(tracer, ROW)
        assert spans.context_of("a") == ""
        spans.noted(rounds.Started(), [], Phase.SELECTING, (1, 1))
        chosen = [rounds.Train(client) for client in "abcd"]
        spans.noted(rounds.Selected(("a", "b", "c", "d")), chosen, Phase.TRAINING, (1, 1))
        assert spans.context_of("a") != spans.context_of("b") != ""
        spared = rounds.MarkMember(1, 1, "c", MemberState.SPARED, "there was enough")
        spans.noted(rounds.UpdateArrived("d"), [spared], Phase.TRAINING, (1, 1))
        assert spans.context_of("c") == spans.context_of("d") == ""
        lost = rounds.MarkMember(1, 1, "a", MemberState.LOST, "gone")
        given_up = rounds.GiveUpAttempt(1, 1, "no quorum")
        spans.noted(rounds.Left(("a",)), [lost, given_up], Phase.SELECTING, (1, 2))
        assert spans.context_of("b") == ""
        spans.close()
        tracer.close()
    failing = [each for each in collector.spans if each.failed]
    failed = Counter((each.name, each.attributes.get("potluck.attempt")) for each in failing)
    assert failed == {("client", None): 1, ("round", 1): 1, ("round", 2): 1}
    names = Counter(each.name for each in collector.spans)
    assert names == {"client": 4, "round": 2, "run": 1, "select": 2, "train": 1}
