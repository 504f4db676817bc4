"""RHFL's weights, compared with the paper's formula, for any reported losses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.strategy_rounds import Rounds, Sent, vector

from potluck.server.strategies.rhfl import RHFL, confidence

NUMBERS = st.floats(allow_nan=True, allow_infinity=True)


def test_client_whose_loss_falls_most_has_the_largest_weight() -> None:
    """A worked example: L from 1 to (.5, .8, .9, .95) gives w = (.3113, .2388, .2273, .2227)."""
    found = confidence(np.ones(4), np.array([0.5, 0.8, 0.9, 0.95]))
    assert found.tolist() == pytest.approx([0.3113, 0.2388, 0.2273, 0.2227], abs=1e-4)


@pytest.mark.parametrize(
    ("before", "losses"),
    [([np.nan] * 3, [1, 2, 3]), ([1, 1, 1], [1, 2, 1]), ([1, 1, 1], [0, np.nan, np.inf])],
)
def test_rhfl_weights_are_equal_if_no_loss_fell(before: list[float], losses: list[float]) -> None:
    assert confidence(np.array(before, float), np.array(losses, float)).tolist() == [1 / 3] * 3


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=6))
def test_rhfl_weights_are_positive_and_sum_to_1_for_any_reported_loss(
    told: list[tuple[float, float]],
) -> None:
    found = confidence(*np.array(told, float).T)
    assert (found > 0).all()
    assert found.sum() == pytest.approx(1.0)


def test_rhfl_compares_a_loss_with_that_of_the_last_round_of_the_client(tmp_path: Path) -> None:
    played = Rounds(RHFL(), vector(0.0), tmp_path)

    def play(**losses: float) -> float:
        sent = {
            client: Sent(weights=vector(float(place)), loss=loss)
            for place, (client, loss) in enumerate(losses.items())
        }
        return float(played.play(sent)["w"][0])

    assert play(a=2.0, b=2.0) == pytest.approx(0.5)
    assert play(b=1.0, c=5.0) == pytest.approx(confidence(np.array([2, np.nan]), np.ones(2))[1])
    assert play(a=1.0, b=0.5) == pytest.approx(0.5), "both halved theirs, a over two rounds"
