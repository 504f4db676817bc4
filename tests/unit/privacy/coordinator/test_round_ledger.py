"""The coordinator's ledger: durable, never below the loss, with an exact limit."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from potluck.common.errors import StorageError
from potluck.common.run_file.run_settings import PrivateUpdates
from potluck.privacy.accounting import GaussianSteps, rdp_of
from potluck.privacy.coordinator.noised_rounds import admits, noise_of
from potluck.privacy.coordinator.round_ledger import (
    CoordinatorLedger,
    NoisedRound,
    RoundLedger,
)
from potluck.privacy.rdp_filter import epsilon_spent

AT = datetime(2026, 5, 4, 12, tzinfo=UTC)
EVENT = GaussianSteps(noise_multiplier=4.0)


def sum_of(round_: int, *clients: str) -> NoisedRound:
    return NoisedRound(
        round=round_, attempt=1, noise_multiplier=4.0, clip=1.0, clients=clients, at=AT
    )


def ledger_file(folder: Path) -> Path:
    return folder / "privacy" / "r.jsonl"


def test_round_ledger_keeps_its_charges_after_a_restart(tmp_path: Path) -> None:
    ledger = RoundLedger(tmp_path, "r")
    ledger.charge(sum_of(1, "a", "b"))
    ledger.charge(sum_of(2, "b"))
    for found in (ledger, RoundLedger(tmp_path, "r")):
        assert found.rounds() == (sum_of(1, "a", "b"), sum_of(2, "b"))
        assert found.clients() == ["a", "b"]
        assert found.events_of("b") == {EVENT: 2}
        assert found.events_of("nowhere") == {}
    assert ledger_file(tmp_path).stat().st_mode & 0o077 == 0


def test_ledgers_of_all_runs_are_added_with_later_charges(tmp_path: Path) -> None:
    together = CoordinatorLedger(tmp_path)
    assert together.events_of(["a"]) == {"a": {}}
    first, second = RoundLedger(tmp_path, "r"), RoundLedger(tmp_path, "s")
    RoundLedger(tmp_path, "pre-r").charge(sum_of(1, "a"))
    first.charge(sum_of(1, "a", "b"))
    second.charge(sum_of(1, "a"))
    assert together.events_of(["a"]) == {"a": {EVENT: 3}}
    with together.locked():
        second.charge(sum_of(2, "a", "b"))
    assert together.events_of(["a", "b"]) == {"a": {EVENT: 4}, "b": {EVENT: 2}}


def test_damaged_ledger_of_another_run_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    RoundLedger(tmp_path, "r").charge(sum_of(1, "a"))
    ledger_file(tmp_path).write_text("{}\n")
    with pytest.raises(StorageError, match="not a valid privacy ledger"):
        CoordinatorLedger(tmp_path).events_of(["a"])


def test_spent_epsilon_of_a_client_covers_the_sums_it_took_part_in(tmp_path: Path) -> None:
    assert RoundLedger(tmp_path, "r").spent(1e-5) == {}
    ledger = RoundLedger(tmp_path, "r")
    ledger.charge(sum_of(1, "a", "b"))
    ledger.charge(sum_of(2, "b"))
    found = RoundLedger(tmp_path, "r").spent(1e-5)
    assert found["a"] == epsilon_spent(rdp_of(EVENT), 1e-5)
    assert found["b"] == epsilon_spent(rdp_of(GaussianSteps(noise_multiplier=4.0, steps=2)), 1e-5)


def test_privacy_loss_of_pretraining_counts_for_its_run(tmp_path: Path) -> None:
    RoundLedger(tmp_path, "pre-r").charge(sum_of(1, "a"))
    ledger = RoundLedger(tmp_path, "r")
    ledger.charge(sum_of(1, "a", "b"))
    assert ledger.events_of("a") == {EVENT: 2}
    assert ledger.events_of("b") == {EVENT: 1}
    assert RoundLedger(tmp_path, "pre-r").events_of("a") == {EVENT: 1}
    assert ledger.rounds() == (sum_of(1, "a", "b"),)


def test_truncated_ledger_line_is_ignored_and_overwritten(tmp_path: Path) -> None:
    RoundLedger(tmp_path, "r").charge(sum_of(1, "a"))
    with ledger_file(tmp_path).open("ab") as file:
        file.write(b'{"round":2,"attempt":1,"clients":["a","b","c"')
    ledger = RoundLedger(tmp_path, "r")
    assert ledger.rounds() == (sum_of(1, "a"),)
    ledger.charge(sum_of(2, "b"))
    assert RoundLedger(tmp_path, "r").rounds() == (sum_of(1, "a"), sum_of(2, "b"))


def test_truncated_first_ledger_line_is_written_again(tmp_path: Path) -> None:
    ledger_file(tmp_path).parent.mkdir()
    ledger_file(tmp_path).write_bytes(b'{"ru')
    RoundLedger(tmp_path, "r").charge(sum_of(1, "a"))
    assert RoundLedger(tmp_path, "r").rounds() == (sum_of(1, "a"),)


@pytest.mark.parametrize("content", ["{}\n", '{"run": "other"}\n', '{"run": "r"}\nnonsense\n'])
def test_damaged_round_ledger_is_refused_and_not_treated_as_empty(
    tmp_path: Path, content: str
) -> None:
    ledger_file(tmp_path).parent.mkdir()
    ledger_file(tmp_path).write_text(content)
    with pytest.raises(StorageError, match="not a valid privacy ledger"):
        RoundLedger(tmp_path, "r").charge(sum_of(1, "a"))


def test_round_ledger_that_can_not_be_written_raises_storage_error(tmp_path: Path) -> None:
    ledger = RoundLedger(tmp_path, "r")
    (tmp_path / "privacy").write_text("a file where the folder should be")
    with pytest.raises(StorageError, match="can't"):
        ledger.charge(sum_of(1, "a"))


@pytest.mark.parametrize("trainings", [1, 2, 7, 30])
@pytest.mark.parametrize("epsilon", [0.5, 3.0, 20.0])
def test_computed_noise_admits_exactly_the_planned_trainings(
    epsilon: float, trainings: int
) -> None:
    settings = PrivateUpdates(
        unit="client", noise="coordinator", epsilon=epsilon, trainings=trainings
    )
    event = GaussianSteps(noise_multiplier=noise_of(settings, 100))
    assert admits({event: trainings - 1}, event, epsilon, settings.delta)
    assert not admits({event: trainings}, event, epsilon, settings.delta)
