"""Weights of updates that the selector sets, and updates that it excludes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.strategy_rounds import Rounds, Sent, vector

from potluck.common.settings.plugins import create
from potluck.server.strategy import Strategy

MODELS = {"a": vector(1, 2), "b": vector(3, -1), "c": vector(0, 5)}
DRAWS = {"a": 1, "b": 3, "c": 2}


@pytest.mark.parametrize("name", ["fedavg", "fedavgm", "fedadam", "fednova", "clipped-mean"])
def test_weights_from_the_selector_replace_sample_counts(name: str, tmp_path: Path) -> None:
    def model(samples: dict[str, int], weights: dict[str, float] | None = None) -> np.ndarray:
        rounds = Rounds(create(Strategy, name, {}), vector(0, 0), tmp_path)
        sent = {c: Sent(weights=MODELS[c], samples=samples[c], steps=2) for c in MODELS}
        return np.asarray(rounds.play(sent, weights=weights)["w"])

    unequal = {"a": 70, "b": 1, "c": 9}
    weighed = model(unequal, {client: draws / 6 for client, draws in DRAWS.items()})
    np.testing.assert_allclose(weighed, model(DRAWS), rtol=1e-6)
    assert not np.allclose(weighed, model(unequal))


@pytest.mark.parametrize("name", ["fedavg", "fednova", "median", "fedatt", "scaffold"])
def test_update_excluded_by_the_selector_changes_the_model_no_more_than_a_missing_one(
    name: str, tmp_path: Path
) -> None:
    def model(clients: str, aside: str = "") -> np.ndarray:
        strategy = create(Strategy, name, {})
        rounds = Rounds(strategy, vector(0, 0), tmp_path)
        kept = {auxiliary: vector(1, 1) for auxiliary in strategy.auxiliary}
        sent = {c: Sent(weights=MODELS[c], auxiliaries=kept, samples=DRAWS[c]) for c in clients}
        return np.asarray(rounds.play(sent, aside=aside, clients=3)["w"])

    assert (model("abc", aside="b") == model("ac")).all()
    assert not (model("abc") == model("ac")).all()
