"""The spans of rounds that go wrong; those of good ones are tested with a federation."""

from __future__ import annotations

from support.collector import running_collector
from support.stored import AT, RUN

from potluck.common.tracing.opening import open_tracer
from potluck.common.tracing.tracing_settings import TracingSettings
from potluck.server.rounds import events as rounds
from potluck.server.rounds.machine import Phase
from potluck.server.store.records import MemberState, RunRow, RunState
from potluck.server.watching.run_spans import RunSpans

ROW = RunRow(
    **vars(RUN),
    state=RunState.RUNNING,
    reason="",
    changed_at=AT,
    committed_rounds=0,
    model_blake3=None,
)


def test_an_attempt_that_is_given_up_ends_with_the_reason() -> None:
    with running_collector() as collector:
        settings = TracingSettings(endpoint=f"http://127.0.0.1:{collector.port}")
        tracer = open_tracer(settings, "potluck-coordinator")
        assert tracer is not None
        spans = RunSpans(tracer, ROW)
        assert spans.context_of("a") == ""
        spans.noted(rounds.Started(), [], Phase.SELECTING, (1, 1))
        chosen = [rounds.Train("a"), rounds.Train("b")]
        spans.noted(rounds.Selected(("a", "b")), chosen, Phase.TRAINING, (1, 1))
        assert spans.context_of("a") != spans.context_of("b") != ""
        lost = rounds.MarkMember(1, 1, "a", MemberState.LOST, "gone")
        given_up = rounds.GiveUpAttempt(1, 1, "no quorum")
        spans.noted(rounds.Left(("a",)), [lost, given_up], Phase.SELECTING, (1, 2))
        assert spans.context_of("b") == ""
        spans.close()
        tracer.close()
    failing = [each for each in collector.spans if each.failed]
    failed = {(each.name, each.attributes.get("potluck.attempt")) for each in failing}
    assert failed == {("client", None), ("round", 1), ("round", 2)}
    names = sorted(each.name for each in collector.spans)
    assert names == ["client", "client", "round", "round", "run", "select", "select", "train"]
