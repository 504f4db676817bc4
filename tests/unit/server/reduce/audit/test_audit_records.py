"""The audit of claimed label counts, built from the records of a run."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from potluck.common.disclosure import Mode, Parameters, TaskReference
from potluck.common.errors import RunError, StorageError
from potluck.common.tensors.encoding import EncodedUpdate, Encoding
from potluck.common.tensors.tensor_files import open_tensors, write_tensors
from potluck.server.plan.plan import RunPlan, draw_up
from potluck.server.reduce.audit.audit_records import (
    BiasRecords,
    audit_run,
    bias_changes,
    check_auditable,
)
from potluck.server.reduce.audit.label_audit import Contradiction, LabelVerdict
from potluck.server.selection import Population
from potluck.server.store.records import (
    AttemptKey,
    MemberRow,
    MemberState,
    RoundRow,
    UpdateRow,
)

AT = datetime(2026, 5, 4, 12, tzinfo=UTC)


def plan(
    more: str = "", *, selector: str = "fedentopt", options: str = "", training: str = ""
) -> RunPlan:
    text = f"{more}\n[task]\nname = 'colored-digits'\n[selector]\nname = '{selector}'\n{options}\n"
    text += f"[training]\nlearning_rate = 0.1\nmomentum = 0.0\nbatch_size = 32\n{training}\n"
    return draw_up(text, source="test")


def committed(number: int, clients: list[str]) -> RoundRow:
    update = UpdateRow(
        blake3="0" * 64,
        size=1,
        encoding="float32",
        delta=False,
        compressed=False,
        samples=40,
        steps=10,
        seconds=1.0,
        loss=None,
    )
    members = [
        MemberRow(
            client_id=client,
            host_id="h",
            state=MemberState.INCLUDED,
            reason="",
            trouble=None,
            update=update,
        )
        for client in clients
    ]
    return RoundRow(
        key=AttemptKey("r", number, 1),
        model_blake3="0" * 64,
        state_blake3=None,
        selector_scalars={},
        strategy_scalars={},
        metrics={},
        seconds=1.0,
        bytes_down=0,
        bytes_up=0,
        committed_at=AT,
        members=members,
    )


def population(*claims: list[float]) -> Population:
    return Population(
        ids=[f"client-{row}" for row in range(len(claims))],
        classes=2,
        samples=np.full(len(claims), 40),
        label_counts=np.array(claims),
    )


def test_audit_suspects_a_client_that_hides_a_class_and_not_an_honest_one(tmp_path: Path) -> None:
    records = BiasRecords(tmp_path / "r")
    rounds = [committed(number, ["client-0", "client-1"]) for number in (1, 2)]
    for one in rounds:
        records.write(one.key.round, {"client-0": [0.3, -0.3], "client-1": [0.3, -0.3]})
    records.write(3, {"client-2": [0.3, -0.3]})  # round 3 was reduced, never committed
    claims = population([38, 2], [0, 40], [20, 20])
    honest, liar, unseen = audit_run(
        plan(), claims, {"client-0": math.inf, "client-1": math.inf}, rounds, records
    )
    assert (honest.verdict, honest.rounds) == (LabelVerdict.CONSISTENT, 2)
    assert (unseen.row, unseen.verdict) == (2, LabelVerdict.UNKNOWN)
    assert (liar.row, liar.verdict) == (1, LabelVerdict.SUSPICIOUS)
    [suspicion] = liar.suspicions
    assert suspicion.contradiction is Contradiction.HIDDEN
    # Ten steps of 0.1 make five passes over a batch of 32 samples and one of 8: for a rise of 0.3,
    # at least 0.6 of the 8 samples have the class.
    assert suspicion.bound == 4
    # With a bucketed sample count, the number of steps is uncertain, so the bound is lower.
    _, liar, _ = audit_run(plan("weighting = 'bucketed'"), claims, {}, rounds, records)
    assert [each.bound for each in liar.suspicions] == [1]


@pytest.mark.parametrize(
    "more", ["training.gradient_clip = 1.0", "training.learning_rate_decay = 0.1"]
)
def test_class_whose_bias_never_rose_is_not_suspicious_when_steps_may_be_short(
    tmp_path: Path, more: str
) -> None:
    """Ten steps of 0.3 are long enough for suspicion; clipped or decayed steps may be too short."""
    records = BiasRecords(tmp_path / "r")
    rounds = [committed(number, ["client-0"]) for number in range(1, 7)]
    for one in rounds:
        records.write(one.key.round, {"client-0": [1e-6, -1e-6]})

    def verdict(*tables: str) -> LabelVerdict:
        drawn_up = draw_up(
            "\n".join(
                [
                    "training.learning_rate = 0.3",
                    "training.momentum = 0.0",
                    *tables,
                    "[task]\nname = 'colored-digits'\n[selector]\nname = 'fedentopt'",
                ]
            ),
            source="test",
        )
        [audit] = audit_run(drawn_up, population([20, 20]), {}, rounds, records)
        return audit.verdict

    assert verdict() is LabelVerdict.SUSPICIOUS
    assert verdict(more) is LabelVerdict.CONSISTENT


def test_claim_that_noise_can_explain_is_not_suspicious(tmp_path: Path) -> None:
    records = BiasRecords(tmp_path / "r")
    records.write(1, {"client-0": [0.05, -0.05]})
    noisy = Parameters(
        mode=Mode.NOISY, task=TaskReference(name="t"), epsilon=0.5, adjacency="replace"
    )
    assert noisy.noise_rate == 0.25
    rounds = [committed(1, ["client-0"])]
    for rate, verdict in (
        (math.inf, LabelVerdict.SUSPICIOUS),
        (noisy.noise_rate, LabelVerdict.CONSISTENT),
    ):
        [audit] = audit_run(plan(), population([0, 40]), {"client-0": rate}, rounds, records)
        assert audit.verdict is verdict


def test_bias_changes_come_from_the_last_bias_of_the_model(tmp_path: Path) -> None:
    model: dict[str, NDArray[Any]] = {
        "w": np.zeros((2, 3), np.float32),
        "count": np.zeros(1, np.int64),
        "b": np.ones(2, np.float32),
    }
    write_tensors(tmp_path / "model", model)
    moved = model | {"b": np.array([1.5, 0.25], np.float32)}
    write_tensors(tmp_path / "update", moved)
    with open_tensors(tmp_path / "model") as base, open_tensors(tmp_path / "update") as file:
        update = EncodedUpdate(file, base.layout, Encoding.FLOAT32, None)
        assert bias_changes({"c": update}, base, 2) == {"c": [0.5, -0.75]}
        assert bias_changes({"c": update}, base, 5) == {}


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (plan(selector="uniform"), "no client was asked"),
        (plan("transport.up.encoding = 'int8'"), "int8"),
        (plan("transport.down.encoding = 'bfloat16'"), "transport.down.encoding = 'float32'"),
        (plan("strategy.name = 'scaffold'"), "strategy 'scaffold' corrects the steps of clients"),
        (plan("strategy.name = 'fedbio'"), "strategy 'fedbio' corrects the steps of clients"),
        (
            plan(training="optimizer = 'adam'"),
            "valid for training.optimizer = 'sgd', not for 'adam'",
        ),
        (plan(training="optimizer = 'adamw'"), "not for 'adamw'"),
        (
            plan(training="weight_decay = 1e-4"),
            "training.weight_decay = 0.0001 also changes the output",
        ),
        (plan(selector="kl", options="truncate = true"), "selector 'kl' limits the samples"),
        (plan("model.trainable = ['2.*']"), "`trainable` of \\[model\\] divides the model"),
        (plan("model.keep = ['2.*']"), "`keep` of \\[model\\] divides the model"),
        (plan("objective = [{name = 'fedprox'}]"), "not for 'fedprox'"),
    ],
)
def test_audit_of_a_run_without_claims_or_biases_is_refused_with_the_reason(
    run: RunPlan, why: str
) -> None:
    check_auditable(plan())
    with pytest.raises(RunError, match=why):
        check_auditable(run)


def test_damaged_bias_record_is_refused_naming_its_file(tmp_path: Path) -> None:
    records = BiasRecords(tmp_path)
    assert records.read(4) == {}
    (tmp_path / "4.json").write_text('{"client-0": [0.1')
    with pytest.raises(StorageError, match=r"4\.json"):
        records.read(4)
