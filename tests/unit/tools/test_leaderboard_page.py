"""The leaderboard's tables are those of the results that come with Potluck."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import leaderboard_page
from leaderboard_page import PAGE, PUBLISHED, check_versions, filled, measure, tables
from potluck.common.errors import ConfigurationError
from potluck.experiments.benchmark.standing import ArmResult, published
from potluck.experiments.benchmark.tier import Tier


def test_leaderboard_page_equals_the_generated_one() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == filled(page), "run: make pages"


def test_results_of_other_targets_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_another_target(tier: Any, folder: Path) -> Any:
        known = dict(published(tier, folder))
        return known | {"oort": known["oort"].model_copy(update={"targets": {}})}

    monkeypatch.setattr(leaderboard_page, "published", with_another_target)
    with pytest.raises(ConfigurationError, match="results of oort in tier smoke have other data"):
        tables("smoke")


def test_measured_arm_gets_other_seconds_in_all_tiers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def measured(tier: Tier, result: ArmResult) -> ArmResult:
        return result.model_copy(update={"server_seconds": 77.0})

    monkeypatch.setattr(leaderboard_page, "measured_again", measured)
    folder = shutil.copytree(PUBLISHED, tmp_path / "published")
    measure(["refl"], folder)
    changed = []
    for file in sorted(folder.rglob("*.json")):
        place = file.relative_to(folder)
        old = (PUBLISHED / place).read_text(encoding="utf-8").splitlines()
        new = file.read_text(encoding="utf-8").splitlines()
        changed += [(str(place), one) for one, other in zip(new, old, strict=True) if one != other]
    seconds = ' "server_seconds": 77.0,'
    assert changed == [("smoke/refl.json", seconds), ("standard/refl.json", seconds)]


def test_arm_without_a_result_is_not_measured(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no tier has a published result of oorrt$"):
        measure(["oorrt"], tmp_path)


def test_rows_of_a_changed_potluck_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "smoke"
    shutil.copytree(PUBLISHED / "smoke", folder)
    assert check_versions("smoke", tmp_path) == len(list(folder.glob("*.json")))
    path = folder / "afl.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"software": "0.1.0.dev1+gabc.dirty"}))
    with pytest.raises(ConfigurationError, match=r"results of afl in tier smoke .*\.dirty"):
        check_versions("smoke", tmp_path)
