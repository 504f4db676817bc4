"""Evaluations of clients that are complete, missing or malformed."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

from potluck.common.learning.spread import Coverage
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1.coordinator_pb2 import Answer
from potluck.server.hosts import held_out_evaluation
from potluck.server.hosts.attendance import Attendance
from potluck.server.hosts.held_out_evaluation import HeldOut, evaluate_on_clients
from potluck.server.plan.plan import RunPlan, draw_up
from potluck.server.store.model_files import ModelVersion
from potluck.server.store.records import AttemptKey

PLAN = draw_up(
    'rounds = 1\nclients_per_round = 2\ntask = {name = "digits", clients = 8}\n', source="run.toml"
)


def counts(correct: int, wrong: int, loss_sum: float = 1.0) -> Answer:
    confusion = [0] * 100
    confusion[0], confusion[1] = correct, wrong
    return Answer(evaluation=rpc.EvaluationCounts(loss_sum=loss_sum, confusion=confusion))


def failure(reason: str) -> Answer:
    return Answer(failure=rpc.Failure(reason=reason, message=f"because of {reason}"))


async def evaluated(
    answers: dict[str, Answer],
    clients: str,
    monkeypatch: pytest.MonkeyPatch,
    away: str = "",
    plan: RunPlan = PLAN,
) -> tuple[HeldOut, list[str]]:
    """Return the outcome and the notices of `clients`, of which only those in `answers` answer."""

    async def gather(*_: object, **__: object) -> dict[str, Answer]:
        return answers

    monkeypatch.setattr(held_out_evaluation, "gather", gather)
    notices: list[str] = []
    found = await evaluate_on_clients(
        Attendance(time.monotonic),
        plan,
        AttemptKey("run", 3, 1),
        ModelVersion(blake3="a" * 64, size=10, renditions=()),
        list(clients),
        seconds=9.0,
        present=lambda client: client not in away,
        kept=lambda _: None,
        warn=notices.append,
    )
    return found, notices


async def test_missing_evaluations_are_counted_by_reason_in_one_notice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = {
        "a": counts(9, 1),
        "b": failure("TRAINING_FAILED"),
        "c": failure("DISCLOSURE_REFUSED"),
        "d": Answer(checked=rpc.Checked()),
    }
    found, [notice] = await evaluated(answers, "abcdef", monkeypatch, away="e")
    assert found.metrics["accuracy"] == 0.9
    assert set(found.coverage) == {"accuracy", "loss", "weighted_f1"}
    assert found.coverage["accuracy"] == Coverage(clients=1, asked=6, samples=10, partial=True)
    assert notice.startswith("round 3: the model metrics are over 1 of 6 clients (10 samples): ")
    for part in ("1 failed with TRAINING_FAILED (b; ", "1 refused with DISCLOSURE_REFUSED (c; "):
        assert part in notice
    assert "2 for other reasons" in notice


@pytest.mark.parametrize(
    ("away", "why"), [("b", "1 disconnected (b)"), ("", "1 did not answer within 9 s (b)")]
)
async def test_client_without_an_answer_is_reported_as_disconnected_or_late(
    away: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, [notice] = await evaluated({"a": counts(1, 1)}, "ab", monkeypatch, away=away)
    assert why in notice


async def test_clients_without_held_out_samples_are_not_reported_as_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = {"a": counts(1, 1), "b": counts(0, 0), "c": failure("NOTHING_HELD_OUT")}
    found, notices = await evaluated(answers, "abc", monkeypatch)
    assert notices == []
    assert found.coverage["loss"] == Coverage(clients=1, asked=1, samples=2)
    none: Any = await evaluated({"c": failure("NOTHING_HELD_OUT")}, "c", monkeypatch)
    assert none == (HeldOut(), [])


async def test_no_spread_of_the_loss_is_shown_if_that_of_a_client_is_infinite(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise the worst clients would be missing in the worst tenth."""
    text = 'rounds = 1\ntask = {name = "digits"}\nevaluation = {spread = true, least_group = 3}\n'
    plan = draw_up(text, source="run.toml")
    answers = {client: counts(9, 1) for client in "abcd"}
    found, _ = await evaluated(answers, "abcd", monkeypatch, plan=plan)
    assert set(found.spreads) == {"accuracy", "loss", "weighted_f1"}
    answers["d"] = counts(1, 9, loss_sum=math.inf)
    found, _ = await evaluated(answers, "abcd", monkeypatch, plan=plan)
    assert set(found.spreads) == {"accuracy", "weighted_f1"}
    assert "loss" not in found.metrics
    assert found.coverage["loss"].clients == 4
