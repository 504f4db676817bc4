"""Findings of `potluck doctor` about a host's trainings with noise."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from potluck.client.config import ClientConfig
from potluck.common.settings.extras import MissingLibraryError
from potluck.deploy.doctor import party_checks
from potluck.deploy.doctor.diagnosis import Finding, Verdict
from potluck.deploy.doctor.party_checks import private_trainings
from potluck.privacy.host.privacy_ledger import ChargedTraining, PrivacyLedger


def findings(folder: Path, **disclosure: Any) -> list[Finding]:
    tls = {name: folder / name for name in ("certificate", "key", "authority")}
    config = ClientConfig.model_validate(
        {
            "coordinator": "h:1",
            "clients": ("a", "b"),
            "state_directory": folder,
            "tls": tls,
            "disclosure": disclosure,
        }
    )
    return list(private_trainings(config))


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    """Write the ledger of a client with one training of ε ≈ 5."""
    folder = tmp_path / "privacy"
    folder.mkdir()
    training = ChargedTraining(
        data_epoch=1,
        sampling_rate=1.0,
        noise_multiplier=1.0,
        steps=1,
        work="w",
        federation="f",
        coordinator="c",
        run="r",
        round=1,
        at=datetime(2026, 5, 4, tzinfo=UTC),
    )
    PrivacyLedger(folder).charge("a", training)
    return folder / "a.jsonl"


def test_a_host_that_never_trained_with_noise_has_no_finding(tmp_path: Path) -> None:
    (tmp_path / "privacy").mkdir()
    assert findings(tmp_path) == []


@pytest.mark.usefixtures("ledger")
def test_clients_near_the_privacy_limit_are_a_warning(tmp_path: Path) -> None:
    [found] = findings(tmp_path, training_epsilon=20)
    assert found.verdict is Verdict.OK
    [found] = findings(tmp_path, training_epsilon=5.5)
    assert found.verdict is Verdict.WARNING
    assert found.found.endswith("near the limit: a")
    assert "the data owner can raise disclosure.training_epsilon" in found.remedy


def test_damaged_privacy_ledger_is_an_error(tmp_path: Path, ledger: Path) -> None:
    ledger.write_text("odd\n")
    [found] = findings(tmp_path)
    assert found.verdict is Verdict.ERROR
    assert "restore it from a backup" in found.remedy


def test_missing_privacy_libraries_are_an_error_if_only_noise_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(library: str, _: str) -> None:
        raise MissingLibraryError(f"{library} is not installed; pip install '.[privacy]'")

    monkeypatch.setattr(party_checks, "require", missing)
    [found] = findings(tmp_path, updates="private")
    assert found.verdict is Verdict.ERROR
    assert "[privacy]" in found.remedy


def test_questions_without_a_noisy_form_are_named_if_only_noise_may_leave(tmp_path: Path) -> None:
    asked = ("loss", "availability", "label-entropy")
    warning = findings(tmp_path, updates="private", questions=asked)[0]
    assert warning.verdict is Verdict.WARNING
    assert "allows label-entropy, which can't be answered with noise" in warning.found
    assert findings(tmp_path, questions=asked) == []
