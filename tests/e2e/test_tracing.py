"""Traces of a run that a collector receives from coordinator and hosts."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

from support.collector import ReceivedSpan, running_collector
from support.federation import Federation, crash_federation, until

COORDINATOR, HOST = "potluck-coordinator", "potluck-host"
PHASES = ("select", "train", "reduce", "evaluate", "commit")
STAGES = {"download", "compute", "upload"}


def named(spans: list[ReceivedSpan], service: str, *names: str) -> list[ReceivedSpan]:
    return [each for each in spans if each.service == service and each.name in names]


async def run_that_waits_for_one(federation: Federation) -> tuple[str, int]:
    """Run two rounds; in the second, hold one training until three updates have arrived.

    Return the run's id, and the time at which the training was released, in ns since 1970.
    """
    points = federation.points
    points.hold("observe")
    run_id = await federation.start_run('weighting="equal"', "rounds=2", "clients_per_round=6")
    await until(lambda: points.reached("observe"))
    points.hold("train-client-0")
    points.release("observe")
    await until(lambda: points.reached("train-client-0"))
    spool = federation.state / "spool" / run_id
    await until(lambda: len(list(spool.glob("2.*/*.safetensors"))) >= 3)
    await federation.status(run_id)  # when it answers, it has handled the updates
    released = time.time_ns()
    points.release()
    await federation.finished(run_id)
    return run_id, released


def complete(spans: list[ReceivedSpan], run_id: str, private: str) -> bool:
    """Return True if both runs' last spans have arrived, and the hosts' spans of two rounds."""
    ends = {
        (each.name, each.attributes.get("potluck.run"))
        for each in named([*spans], COORDINATOR, "run", "round")
    }
    hosts = len(named([*spans], HOST, "train"))
    return {("run", run_id), ("round", private)} <= ends and hosts >= 8


async def test_round_is_one_trace_across_coordinator_and_hosts(tmp_path: Path) -> None:
    with running_collector() as collector:
        tracing = {"tracing": {"endpoint": f"http://127.0.0.1:{collector.port}"}}
        async with crash_federation(
            tmp_path,
            hosts=2,
            rounds=3,
            coordinator={"tracing": {**tracing["tracing"], "share": 0.67}},
            host=tracing,
        ) as federation:
            run_id = await federation.start_run()
            await federation.finished(run_id)
            history = await federation.history(run_id)
            private, released = await run_that_waits_for_one(federation)
            await until(lambda: complete(collector.spans, run_id, private), "all spans")
        received = collector.spans  # complete: processes send remaining spans when they end
    hidden = [each for each in received if each.attributes.get("potluck.run") == private]
    [traced] = named(hidden, COORDINATOR, "round")
    hidden += [each for each in received if each.trace == traced.trace and each not in hidden]
    assert named(hidden, HOST, "train") == []
    alike = named(hidden, COORDINATOR, "client")
    assert len(alike) == 6
    # All spans end with the phase, although three clients had finished before: their durations stay
    # hidden.
    assert traced.attributes["potluck.round"] == 2
    assert min(each.end for each in alike) > released
    spans = [each for each in received if each not in hidden]
    [run] = named(spans, COORDINATOR, "run")
    rounds = named(spans, COORDINATOR, "round")
    assert [each.attributes["potluck.round"] for each in rounds] == [2, 3]
    for span, committed in zip(rounds, history[1:], strict=True):
        assert (span.parent, span.links, span.failed) == (b"", (run.id,), False)
        assert span.attributes["potluck.run"] == run_id
        own = [each for each in spans if each.trace == span.trace]
        parts = [each for each in own if each.parent == span.id]
        assert [each.name for each in sorted(parts, key=lambda each: each.begin)] == list(PHASES)
        assert all(span.begin <= each.begin <= each.end <= span.end for each in parts)
        clients = {
            each.attributes["potluck.client"]: each for each in named(own, COORDINATOR, "client")
        }
        assert set(clients) == {member.client_id for member in committed.members}
        works = named(own, HOST, "train")
        assert {each.attributes["potluck.client"] for each in works} == set(clients)
        for work in works:
            assert work.parent == clients[work.attributes["potluck.client"]].id
            stages = Counter(each.name for each in own if each.parent == work.id)
            assert set(stages) == STAGES
    assert {each.trace for each in named(spans, HOST, "train")} <= {each.trace for each in rounds}
