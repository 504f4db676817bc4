"""The leaderboard's tables are those of the results that come with Potluck."""

from typing import Any

import pytest

import leaderboard_page
from leaderboard_page import PAGE, filled, tables
from potluck.common.errors import ConfigurationError
from potluck.experiments.benchmark.standing import published


def test_leaderboard_page_equals_the_generated_one() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == filled(page), "run: make pages"


def test_results_of_other_targets_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_another_target(tier: Any) -> Any:
        known = dict(published(tier))
        return known | {"oort": known["oort"].model_copy(update={"targets": {}})}

    monkeypatch.setattr(leaderboard_page, "published", with_another_target)
    with pytest.raises(ConfigurationError, match="results of oort in tier smoke have other data"):
        tables("smoke")
