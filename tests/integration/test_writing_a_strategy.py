"""The package of docs/guides/writing-a-strategy.md is built, installed and used."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.guide_packages import install_package_of
from support.profile_federation import profile_federation
from support.strategy_rounds import Rounds, Sent, vector

from potluck.common.errors import ConfigurationError, PluginError
from potluck.common.settings.plugins import create
from potluck.server.strategy import Strategy


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fair")
    files = ["fair_strategy.py", "pyproject.toml"]
    return install_package_of("writing-a-strategy.md", folder, files=files)


@pytest.fixture
def installed(package: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Install the package for this process and for processes started meanwhile."""
    monkeypatch.syspath_prepend(str(package))
    before = os.environ.get("PYTHONPATH")
    path = os.pathsep.join(filter(None, [str(package), before]))
    monkeypatch.setenv("PYTHONPATH", path)
    yield package
    sys.modules.pop("fair_strategy", None)


def test_guide_strategy_weights_updates_as_the_page_says(installed: Path, tmp_path: Path) -> None:
    strategy = create(Strategy, "fair", {"q": 1.0, "warm_up": 1})
    rounds = Rounds(strategy, vector(0.0), tmp_path)
    updates = {
        "well": Sent(weights=vector(1.0), loss=1.0, samples=10),
        "badly": Sent(weights=vector(2.0), loss=3.0, samples=10),
        "silent": Sent(weights=vector(1.0), loss=float("nan"), samples=10),
    }
    mean = (1.0 + 3.0 * 2.0 + 1.0) / 5.0
    np.testing.assert_allclose(rounds.play(updates)["w"], mean / 2, rtol=1e-6)
    # The strategy halves the first step only.
    np.testing.assert_allclose(rounds.play(updates)["w"], mean, rtol=1e-6)


async def test_federation_trains_with_the_guide_strategy(installed: Path, tmp_path: Path) -> None:
    async with profile_federation(tmp_path, selector="uniform", count=4) as federation:
        run_id = await federation.start_run('strategy.name="fair"', "strategy.warm_up=2")
        await federation.finished(run_id)
        [first, second] = await federation.history(run_id)
        assert first.model_blake3 != second.model_blake3
        with pytest.raises(PluginError, match="its options: q, warm_up"):
            await federation.start_run('strategy.name="fair"', "strategy.nap=1")
        with pytest.raises(ConfigurationError, match="fair: option 'q' is 11; it must be less"):
            await federation.start_run('strategy.name="fair"', "strategy.q=11")


def test_error_without_the_package_lists_installed_strategies() -> None:
    with pytest.raises(PluginError, match="'fair' is not installed; installed: bulyan"):
        create(Strategy, "fair", {})
