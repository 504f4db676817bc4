"""A selector asks real hosts before it selects, even if either side is killed meanwhile.

All tests share the processes: each starts a run of its own with the same seed.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from support.federation import Federation, crash_federation, set_values, until

from potluck.client.config import load_config
from potluck.rpc.v1 import operator_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")

CLIENTS, COUNT, ROUNDS = 6, 2, 2
ASKING = 'selector.name="asking"'


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Federation]:
    folder = tmp_path_factory.mktemp("asking")
    async with crash_federation(
        folder, clients=CLIENTS, count=COUNT, rounds=ROUNDS, assignments=[ASKING]
    ) as federation:
        yield federation


@pytest_asyncio.fixture(loop_scope="module")
async def federation(shared: Federation) -> Federation:
    shared.points.clear()
    return shared


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(shared: Federation) -> list[operator_pb2.CommittedRound]:
    """Return the committed rounds of a run without faults."""
    run_id = await shared.start_run()
    await shared.finished(run_id)
    return await shared.history(run_id)


def lines(federation: Federation, name: str) -> list[str]:
    path = federation.points.folder / name
    return path.read_text().splitlines() if path.exists() else []


def observed(federation: Federation) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines(federation, "observed")]


async def test_selector_chooses_clients_by_their_answers(federation: Federation) -> None:
    run_id = await federation.start_run()
    await federation.finished(run_id)
    history = await federation.history(run_id)
    assert [seen["round"] for seen in observed(federation)] == [1, 2]
    for seen, committed in zip(observed(federation), history, strict=True):
        everybody, half = seen["asked"]
        assert everybody == list(range(CLIENTS))
        losses = dict(zip(everybody, seen["losses"][0], strict=True))
        ranked = sorted(losses, key=lambda row: -losses[row])
        assert half == ranked[: CLIENTS // 2]
        assert seen["losses"][1] == [losses[row] for row in half], "the same question, twice"
        cohort = [f"client-{row}" for row in ranked[:COUNT]]
        assert [member.client_id for member in committed.members] == cohort
        assert [member.reason for member in committed.members] == [
            f"loss {losses[row]:.6f}" for row in ranked[:COUNT]
        ]
    for row in range(CLIENTS):
        times = sum(row in asked for seen in observed(federation) for asked in seen["asked"])
        assert len(lines(federation, f"answered-client-{row}")) == times


@pytest.mark.parametrize("point", ["ask", "answer-1", "answer-2"])
async def test_coordinator_killed_while_its_selector_asks_gives_the_same_model(
    federation: Federation, undisturbed: list[operator_pb2.CommittedRound], point: str
) -> None:
    federation.points.kill(point)
    run_id = await federation.start_run()
    assert await federation.coordinator.ended() == 137
    await federation.restart_coordinator()
    assert await federation.finished(run_id) == undisturbed[-1].model_blake3
    assert await federation.history(run_id) == unlike_only_in_time(
        undisturbed, await federation.history(run_id)
    )
    # Questions that clients had answered before the kill are not asked again.
    first = [seen for seen in observed(federation) if seen["round"] == 1][-1]
    for row in range(CLIENTS):
        asked = sum(row in rows for seen in observed(federation) for rows in seen["asked"])
        assert len(lines(federation, f"answered-client-{row}")) == asked
    assert len(first["asked"]) == 2


async def test_coordinator_killed_while_clients_answer_gives_the_same_model(
    federation: Federation, undisturbed: list[operator_pb2.CommittedRound]
) -> None:
    federation.points.hold("question-client-3")
    run_id = await federation.start_run()
    await until(lambda: federation.points.reached("question-client-3"))
    await until(lambda: bool(lines(federation, "answered-client-0")))
    await federation.kill_coordinator()
    federation.points.release()
    await federation.restart_coordinator()
    assert await federation.finished(run_id) == undisturbed[-1].model_blake3
    assert len(lines(federation, "answered-client-0")) <= 2 * ROUNDS, "hosts answer from memory"


async def test_sample_quotas_hold_after_kills_of_all_processes(federation: Federation) -> None:
    run_id = await federation.start_run("selector.quota=5.0")
    wanted = await federation.finished(run_id)
    for committed in await federation.history(run_id):
        assert all(0 < member.samples <= 3 * 5 for member in committed.members)
    federation.points.clear()
    held = [f"train-client-{row}" for row in range(CLIENTS)]
    federation.points.hold(*held)
    run_id = await federation.start_run("selector.quota=5.0")
    await until(lambda: any(federation.points.reached(point) for point in held))
    await federation.kill_coordinator()
    federation.points.release()
    await federation.kill_host(0)
    await federation.kill_host(1)
    await federation.kill_host(2)
    await federation.restart_coordinator()
    await federation.start_hosts()
    assert await federation.finished(run_id) == wanted


async def test_host_downloads_a_model_once_to_answer_and_to_train(federation: Federation) -> None:
    run_id = await federation.start_run("task.parameters=200000")
    await federation.finished(run_id)
    hosts, size = len(federation.files.hosts), 4 * 200_000
    for committed in await federation.history(run_id):
        assert hosts * size <= committed.bytes_down < (hosts + 1) * size


async def test_selection_continues_without_clients_that_answer_too_late(
    federation: Federation,
) -> None:
    federation.points.hold("question-client-3")
    run_id = await federation.start_run("round.question_deadline_seconds=8.0")
    await until(lambda: federation.points.reached("answer-1"))
    federation.points.release()
    await federation.finished(run_id)
    first, second = observed(federation)
    assert 3 not in first["asked"][0]
    assert first["asked"][0], "the others' answers count"
    assert second["asked"][0] == list(range(CLIENTS)), "and later its own does again"


async def test_selection_continues_without_a_host_killed_while_it_is_asked(
    federation: Federation,
) -> None:
    federation.points.hold("question-client-3")
    run_id = await federation.start_run('round.leavers="drop"', "rounds=1")
    await until(lambda: federation.points.reached("question-client-3"))
    host = 1
    assert clients_of(federation, host) == [2, 3]
    await federation.kill_host(host)
    await federation.finished(run_id)
    federation.points.release()
    await federation.processes.start_host(host)
    await federation.until_attending()
    [seen] = observed(federation)
    assert 3 not in seen["asked"][0]
    assert seen["asked"][0]


async def test_unknown_kind_of_question_fails_the_run_with_the_reason(
    federation: Federation,
) -> None:
    run_id = await federation.start_run('selector.kind="psychic"', "rounds=1")
    notices: list[str] = []
    async for event in federation.operator.watch_run(run_id):
        if event.WhichOneof("event") == "notice":
            notices.append(event.notice.text)
    status = await federation.ended(run_id)
    assert status.state == operator_pb2.RUN_STATE_FAILED
    assert status.reason.startswith("0 of 6 clients can take part, but at least ")
    assert "6 clients excluded: potluck.questions: 'psychic' is not installed" in status.reason
    [told, *_] = [text for text in notices if "psychic" in text]
    assert "of 6 clients, 6 clients did not answer 'psychic': potluck.questions: " in told


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("no ask", "yielded a str; it must yield Ask"),
        ("stranger", "asks row 99, whose client is not available"),
        ("raises", "failed in select of round 1: KeyError: 'a bug' (potluck_crash_questions.py:"),
        ("endless", "asked more than 100 questions in round 1"),
        ("no selection", "returned nothing; it must return a Selection"),
    ],
)
async def test_invalid_selection_of_a_selector_fails_the_run(
    federation: Federation, fault: str, reason: str
) -> None:
    run_id = await federation.start_run(f'selector.fault="{fault}"')
    status = await federation.ended(run_id)
    assert status.state == operator_pb2.RUN_STATE_FAILED
    assert status.reason.startswith("selector 'asking' ")
    assert reason in status.reason


@pytest.mark.parametrize(
    ("point", "failed"),
    [
        ("select", "selector 'crash' failed in select of round 1"),
        ("observe", "selector 'crash' failed in observe of round 1"),
        ("init", "strategy 'crash' failed in init"),
        ("weigh", "strategy 'crash' failed in weigh of round 1"),
        ("apply", "strategy 'crash' failed in apply of round 1"),
    ],
)
async def test_run_that_fails_in_a_plugin_names_its_method_and_line(
    federation: Federation, point: str, failed: str
) -> None:
    federation.points.fail(point)
    status = await federation.ended(await federation.start_run('selector.name="crash"'))
    assert status.state == operator_pb2.RUN_STATE_FAILED
    line = r"ValueError: as a test wants it \(potluck_crash_rounds\.py:\d+\)"
    assert re.fullmatch(f"{re.escape(failed)}: {line}", status.reason), status.reason


async def test_hosts_whose_owner_forbids_questions_are_not_asked(federation: Federation) -> None:
    path = federation.files.hosts[0]
    before = path.read_text()
    table: dict[str, Any] = {"questions": []}
    set_values(path, {"disclosure": table})
    await federation.kill_host(0)
    await federation.until_attending(2)
    await federation.processes.start_host(0)
    await federation.until_attending()
    run_id = await federation.start_run("rounds=1")
    await federation.finished(run_id)
    path.write_text(before)
    [seen] = observed(federation)
    silent = clients_of(federation, 0)
    assert seen["asked"][0] == [row for row in range(CLIENTS) if row not in silent]
    for row in silent:
        assert not lines(federation, f"answered-client-{row}")


def clients_of(federation: Federation, host: int) -> list[int]:
    """Return the rows of a host's clients."""
    config = load_config(federation.files.hosts[host], {})
    return [int(client.rpartition("-")[2]) for client in config.client_ids()]


def unlike_only_in_time(
    undisturbed: list[operator_pb2.CommittedRound], history: list[operator_pb2.CommittedRound]
) -> list[operator_pb2.CommittedRound]:
    """Return the undisturbed history with the durations, byte counts and host names of another
    run."""
    expected: list[operator_pb2.CommittedRound] = []
    for one, other in zip(undisturbed, history, strict=True):
        copy = operator_pb2.CommittedRound()
        copy.CopyFrom(one)
        copy.seconds, copy.bytes_down, copy.bytes_up = (
            other.seconds,
            other.bytes_down,
            other.bytes_up,
        )
        copy.committed_at.CopyFrom(other.committed_at)
        for mine, theirs in zip(copy.members, other.members, strict=True):
            mine.seconds = theirs.seconds
        expected.append(copy)
    return expected
