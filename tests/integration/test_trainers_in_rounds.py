"""Custom trainers in rounds of every kind, over real gRPC: with masks, with parts of a model, with
selectors that ask clients, with hosts that report false metrics, and with a coordinator that
can't evaluate."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from grpc import StatusCode as Status
from numpy.typing import NDArray
from structlog.testing import capture_logs
from support.raw_host import RawHost, whole
from support.sum_federation import (
    PATIENCE_SECONDS,
    Members,
    SumFederation,
    host_of,
    sum_federation,
)

from potluck.client.disclosure.disclosure_policy import DisclosurePolicy
from potluck.common.errors import ConfigurationError
from potluck.common.learning.measures import TRAINING
from potluck.common.learning.spread import Coverage
from potluck.common.tensors.tensor_files import write_tensors
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1 import transfer_pb2
from potluck.server.hosts.held_out_evaluation import HeldOut, evaluate_on_clients
from potluck.server.store import RoundRow, RunState
from potluck.server.store.records import MemberState

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

PLUGINS = Path(__file__).parents[1] / "support" / "trainer_plugins"
CLIENTS = 7
LINE = '{name = "line"}'
FAULTY, LIAR = "client-1", f"client-{CLIENTS - 1}"
OPEN = DisclosurePolicy.model_validate(
    {
        "exact_sums": True,
        "held_out_counts": True,
        "least_group": 3,
        "signals": ["label_counts"],
        "questions": ["loss"],
        "epsilon_budget": 100,
    }
)


@pytest_asyncio.fixture(loop_scope="module")
async def federation(
    members: Members, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[SumFederation]:
    monkeypatch.syspath_prepend(PLUGINS)
    data = tmp_path / "data"
    data.mkdir()
    async with sum_federation(members, tmp_path, data_directory=data) as federation:
        await federation.start(
            members.names, disclosure=OPEN, cancel_timeout_seconds=0.2, data_directory=data
        )
        yield federation


def run_file(task: str, *lines: str, count: int = CLIENTS) -> str:
    head = [
        "rounds = 2",
        f"clients_per_round = {count}",
        f"expected_clients = {CLIENTS}",
        f"task = {task}",
    ]
    return "\n".join([*head, *lines, ""])


async def committed(federation: SumFederation, text: str) -> list[RoundRow]:
    """Return the rounds of a finished run."""
    row = await federation.finished(text)
    assert row.state is RunState.FINISHED, row.reason
    return await federation.coordinator.store.call(lambda store: store.rounds(row.run_id))


async def model(federation: SumFederation, row: RoundRow) -> dict[str, NDArray[Any]]:
    with federation.coordinator.files.opened(row.model_blake3) as file:
        return {name: array.copy() for name, array in file.arrays.items()}


MASKED = "secure_aggregation = true"


async def test_masked_rounds_give_the_same_model_without_training_metrics(
    federation: SumFederation,
) -> None:
    masked, opened = [
        await committed(federation, run_file('{name = "line"}', *lines))
        for lines in ((MASKED,), ())
    ]
    one, other = await model(federation, masked[-1]), await model(federation, opened[-1])
    for name, array in one.items():
        assert np.abs(array - other[name]).max() < 1e-6, name
    assert f"{TRAINING}squared_error" in opened[-1].metrics
    assert not [name for row in masked for name in row.metrics if name.startswith(TRAINING)]
    assert masked[-1].metrics["near"] == pytest.approx(opened[-1].metrics["near"], abs=0.02)


def failures_in_metrics(federation: SumFederation) -> list[str]:
    """Return the lines of all hosts' metrics that count failures."""
    return [
        f"{host}: {line}"
        for host, instruments in federation.members.instruments.items()
        for line in instruments.exposition().decode().splitlines()
        if line.startswith("potluck_host_failures_total")
    ]


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        ("raises", "failed for client 'client-1': ValueError: the scanner's file is empty"),
        ("not-a-number", "left NaN, infinity or huge numbers in tensor 'slope'"),
        ("shapes", "returned a model that is not compatible with the task's model"),
    ],
)
async def test_trainer_failure_in_a_masked_round_is_named_only_in_the_host_log(
    federation: SumFederation, fault: str, line: str
) -> None:
    task = f'{{name = "line", fault = "{fault}"}}'
    before = failures_in_metrics(federation)
    with capture_logs() as logs:
        rounds = await committed(federation, run_file(task, MASKED))
    assert failures_in_metrics(federation) == before
    for row in rounds:
        assert {member.state for member in row.members} == {MemberState.INCLUDED}
        assert not any(member.trouble for member in row.members)
    failed = [each for each in logs if each["event"].startswith("training failed; zeros go into")]
    assert {each["client"] for each in failed} == {FAULTY}
    assert all(line in each["message"] for each in failed)
    warnings = [each["event"] for each in logs if "of 7 clients failed" in each["event"]]
    assert len(warnings) == len(rounds)
    assert not any(FAULTY in text for text in warnings)


async def test_host_whose_trainings_fail_repeatedly_is_excluded(
    federation: SumFederation,
) -> None:
    text = run_file('{name = "line", fault = "raises"}').replace("rounds = 2", "rounds = 5")
    with capture_logs() as logs:
        rounds = await committed(federation, text)
    troubles = [
        [member.trouble or "" for member in row.members if member.client_id == FAULTY]
        for row in rounds
    ]
    assert [len(each) for each in troubles] == [1, 1, 1, 0, 0]
    assert "the last 3 trainings of this host failed in the same way: the tr" in troubles[2][0]
    assert "(TRAINING_FAILS_REPEATEDLY)" in troubles[2][0]
    assert all(len(row.included) == CLIENTS - 1 for row in rounds)
    said = [each for each in logs if each["event"].startswith("all trainings fail in the same")]
    assert [each["trainings"] for each in said] == [3]
    assert await committed(federation, run_file(LINE)), "the host trains again"


INT8 = 'transport.up = {encoding = "int8", delta = true}'


async def test_trainable_part_of_a_model_is_sent_in_every_encoding(
    federation: SumFederation, tmp_path: Path
) -> None:
    task = f'{{name = "digits", clients = {CLIENTS}}}'
    arrays = await model(federation, (await committed(federation, run_file(task)))[-1])
    last = sorted(arrays)[-2:]
    base = {name: array for name, array in arrays.items() if name not in last}
    write_tensors(tmp_path / "data" / "rest.safetensors", base)
    part = f'model = {{trainable = {last}, base = "rest.safetensors"}}'.replace("'", '"')
    variates = 'strategy = {name = "scaffold"}'  # with control variates of the trainable part only
    forms = {
        "open": [],
        "masked": [MASKED],
        "open, variates": [variates],
        "int8": [variates, INT8],
    }
    models = {}
    for name, lines in forms.items():
        text = run_file(task, part, *lines)
        models[name] = await model(federation, (await committed(federation, text))[-1])
        assert set(models[name]) == set(last)
    for tensor in last:
        assert np.abs(models["open"][tensor] - models["masked"][tensor]).max() < 1e-4
        assert 0 < np.abs(models["open, variates"][tensor] - models["int8"][tensor]).max() < 0.01


@pytest.mark.parametrize(
    "selector",
    [
        'name = "fedentopt"',
        'name = "dc-balanced", added = 1',
        'name = "kl"',
        'name = "pow-d"',
        'name = "oort"',
    ],
)
async def test_selectors_receive_label_counts_and_losses_of_a_trainer(
    federation: SumFederation, selector: str
) -> None:
    text = run_file('{name = "counted-line"}', f"selector = {{{selector}}}", count=3)
    for row in await committed(federation, text):
        assert len(row.included) == 3
    if "pow-d" in selector or "oort" in selector:
        return
    for name in federation.members.names:
        [release] = federation.disclosed(name)
        assert release.signal == "label_counts"


async def test_label_counts_of_a_trainer_are_summed_securely(federation: SumFederation) -> None:
    selector = 'selector = {name = "dc-real", added = 1}'
    profiles = 'profiles = {sum_mode = "exact"}'
    await committed(federation, run_file('{name = "counted-line"}', selector, profiles, count=3))
    [stored] = await federation.stored()
    assert stored.total is not None
    assert sum(stored.total) == CLIENTS * 40


# A coordinator that measures --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("coordinator", "line"),
    [
        (
            "raises",
            "failed for the coordinator's evaluation data: ValueError: the scanner's fi",
        ),
        ("undeclared", "has the measure 'accuracy', which the task's trainer does not declare"),
    ],
)
async def test_rounds_are_committed_if_the_coordinator_cannot_evaluate(
    federation: SumFederation, coordinator: str, line: str
) -> None:
    task = f'{{name = "line", coordinator = "{coordinator}"}}'
    policy = 'round = {leavers = "drop", quorum = 0.2}'
    with capture_logs() as logs:
        rounds = await committed(federation, run_file(task, policy))
    assert [row.key.round for row in rounds] == [1, 2]
    assert not [n for row in rounds for n in row.metrics if not n.startswith(TRAINING)]
    warnings = [each["event"] for each in logs if each["log_level"] == "warning"]
    for number in (1, 2):
        [said] = [text for text in warnings if f"round {number} is not evaluated: " in text]
        assert line in said
    again = await committed(federation, run_file('{name = "line", coordinator = "measures"}'))
    assert again[-1].metrics["near"] > 0


# Clients that can not measure --------------------------------------------------------------------


def notices(logs: list[Any]) -> list[str]:
    """Return the log lines about missing evaluations."""
    warnings = [each["event"] for each in logs if each["log_level"] == "warning"]
    return [line for line in warnings if "metrics are" in line]


async def test_metric_without_some_clients_is_partial_and_a_notice_names_them(
    federation: SumFederation,
) -> None:
    task = '{name = "line", unable = 3}'
    stop = 'stop = {measure = "near", patience = 1}'
    spread = "evaluation = {spread = true, least_group = 3}"
    with capture_logs() as logs:
        row = await federation.finished(run_file(task, stop, spread))
    assert (row.state, row.reason, row.best) == (RunState.FINISHED, "", None)
    rounds = await federation.coordinator.store.call(lambda store: store.rounds(row.run_id))
    partial = Coverage(clients=4, asked=7, samples=160, partial=True)
    trained = Coverage(clients=7, asked=7, samples=280)
    for each in rounds:
        assert each.coverage == {
            **dict.fromkeys(TRUE, partial),
            **{f"{TRAINING}{name}": trained for name in ("squared_error",)},
        }
        spread_of = each.spreads["near"]
        assert (spread_of.clients, spread_of.asked, spread_of.samples) == (4, 7, 160)
        assert spread_of.partial
    assert notices(logs) == [
        f"round {number}: the model metrics are over 4 of 7 clients (160 samples): 3 failed with "
        "TRAINING_FAILED (client-0, client-1, client-2; for example: 'client-0' lacks its "
        "reference readings); partial: they count neither for the best model nor for [stop]"
        for number in (1, 2)
    ]


async def test_metric_over_the_required_share_of_clients_is_not_partial(
    federation: SumFederation,
) -> None:
    task = '{name = "line", unable = 3}'
    keep = 'retention = {keep_best = "near"}'
    with capture_logs() as logs:
        row = await federation.finished(run_file(task, keep, "evaluation = {least_share = 0.5}"))
    assert row.best is not None
    assert row.best.round in (1, 2)
    assert len(notices(logs)) == 2
    assert not any("partial" in line for line in notices(logs))


async def test_round_without_client_evaluations_has_a_notice_and_no_metric(
    federation: SumFederation,
) -> None:
    with capture_logs() as logs:
        [row] = await committed(
            federation, run_file('{name = "line", unable = 7}').replace("rounds = 2", "rounds = 1")
        )
    assert not [name for name in row.metrics if not name.startswith(TRAINING)]
    assert row.coverage["near"] == Coverage(clients=0, asked=7, samples=0, partial=True)
    [line] = notices(logs)
    assert line.startswith(
        "round 1: the model metrics are missing: none of 7 clients measured them: 7 failed with "
        "TRAINING_FAILED (client-0, client-1, client-2, client-3, client-4 and 2 more; "
    )


async def test_notice_names_evaluations_past_the_deadline(
    federation: SumFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def impatient(*arguments: Any, **settings: Any) -> HeldOut:
        return await evaluate_on_clients(*arguments, **{**settings, "seconds": 0.5})

    monkeypatch.setattr("potluck.server.run.commit.evaluate_on_clients", impatient)
    task = '{name = "line", unable = 7, fault = "evaluation-hangs"}'
    with capture_logs() as logs:
        [row] = await committed(federation, run_file(task).replace("rounds = 2", "rounds = 1"))
    assert row.coverage["near"].partial
    [line] = notices(logs)
    assert "none of 7 clients measured them: 7 did not answer within 0.5 s (client-0, " in line


# Hosts that lie about measures ------------------------------------------------------------------


Said = Mapping[str, tuple[float, int]]
TRUE: Said = {"near": (20.0, 40), "squared_error": (40.0, 40), "loss": (40.0, 40)}
LIES: dict[str, Said] = {
    "undeclared": {"accuracy": (1.0, 1)},
    "not a number": {"squared_error": (float("nan"), 3)},
    "infinite": {"squared_error": (float("inf"), 3)},
    "out of range": {"near": (30.0, 3)},
    "below its range": {"squared_error": (-1.0, 3)},
    "a sum of nothing": {"squared_error": (1.0, 0)},
    "more than there can be": {"near": (0.0, 1 << 62)},
    "many": {f"measure_{number}": (0.0, 1) for number in range(10_000)},
}


def sums(said: Said) -> dict[str, transfer_pb2.MeasuredSum]:
    return {name: transfer_pb2.MeasuredSum(sum=s, count=c) for name, (s, c) in said.items()}


@contextlib.asynccontextmanager
async def lying(
    federation: SumFederation, trained: Said, evaluated: Said
) -> AsyncIterator[list[Any]]:
    """Run the last client's host, which trains nothing and reports these metrics of trainings and
    evaluations. Yield the answers to its uploads."""
    answers: list[Any] = []
    tls = federation.members.tls.hosts[host_of(LIAR)]
    async with (
        RawHost(f"127.0.0.1:{federation.port}", tls) as host,
        host.attending(LIAR) as call,
    ):

        async def answer(instruction: rpc.Instruction) -> None:
            kind = instruction.WhichOneof("work")
            reply = rpc.Answer(instruction_id=instruction.id)
            if kind == "train":
                content = await host.fetch(instruction.train.model)
                report = transfer_pb2.TrainingReport(
                    samples=40, steps=40, seconds=0.1, loss=1.0, measures=sums(trained)
                )
                upload = whole(instruction.id, LIAR, content, report=report)
                answers.append(await host.submit(upload))
                if isinstance(answers[-1], rpc.SubmitUpdateResponse):
                    return
                reply.failure.reason = "REFUSED"  # so that the round does not wait for it
            elif kind == "check":
                reply.checked.SetInParent()
            elif kind == "evaluate":
                reply.measures.SetInParent()
                for name, each in sums(evaluated).items():
                    reply.measures.sums[name].CopyFrom(each)
            else:
                return
            await call.write(rpc.AttendRequest(answer=reply))

        async def attend() -> None:
            while isinstance(message := await call.read(), rpc.AttendResponse):
                if message.HasField("instruction"):
                    await answer(message.instruction)

        attending = asyncio.create_task(attend())
        try:
            yield answers
        finally:
            attending.cancel()
            await asyncio.wait([attending], timeout=PATIENCE_SECONDS)


async def test_invalid_metrics_of_a_client_are_rejected(
    members: Members, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(PLUGINS)
    text = run_file(LINE, "round = {quorum = 0.5}").replace("rounds = 2", "rounds = 1")
    names = {*TRUE, *(f"{TRAINING}{name}" for name in TRUE)}
    async with sum_federation(members, tmp_path) as federation:
        await federation.start(members.names[:-1], disclosure=OPEN)
        for lie, said in LIES.items():
            async with lying(federation, said, TRUE) as answers:
                [row] = await committed(federation, text)
            assert answers == [(Status.INVALID_ARGUMENT, "UPDATE_LAYOUT_MISMATCH")], lie
            assert {m.client_id for m in row.included} == set(members.names[:-1])
            assert row.metrics.keys() == names - {f"{TRAINING}loss", f"{TRAINING}near"}
            async with lying(federation, TRUE, said) as answers:
                with capture_logs() as logs:
                    [row] = await committed(federation, text)
            [answer] = answers
            assert isinstance(answer, rpc.SubmitUpdateResponse), lie
            assert {m.client_id for m in row.included} == set(members.names)
            assert row.metrics.keys() == names
            assert 0 <= row.metrics["near"] <= 1
            events = [each["event"] for each in logs]
            [line] = [event for event in events if event.startswith("round 1: the model metrics")]
            assert (
                f"are over 6 of 7 clients (240 samples): 1 sent invalid numbers ({LIAR}; " in line
            )
            assert len(line) < 400
            assert all(each.partial for n, each in row.coverage.items() if n in TRUE), lie


async def test_a_trainer_without_label_counts_is_refused_before_the_run(
    federation: SumFederation,
) -> None:
    with pytest.raises(ConfigurationError, match="asks clients for label_counts, which the train"):
        await federation.finished(run_file(LINE, 'selector = {name = "fedentopt"}'))
