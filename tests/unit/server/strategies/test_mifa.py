"""MIFA against a second implementation, with clients that come and go."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.strategy_rounds import Rounds, Sent, vector

from potluck.common.disclosure import Weighting
from potluck.common.settings.local_training import LocalTraining
from potluck.server.strategies.mifa import Mifa

CLIENTS = 4


def played(mifa: Mifa, rounds: list[dict[int, float]], folder: Path) -> list[float]:
    """Return the model after each round. rounds: for each client that took part, its difference
    from the round's model."""
    found, game = [], Rounds(mifa, vector(0.0), folder)
    for each in rounds:
        w = float(game.model["w"][0])
        sent = {f"k{client}": Sent(weights=vector(w + d)) for client, d in each.items()}
        found.append(float(game.play(sent, clients=CLIENTS)["w"][0]))
    return found


def test_mifa_reuses_the_last_updates_of_absent_clients(tmp_path: Path) -> None:
    rounds = [{0: 4.0, 1: 8.0}, {2: 4.0}, {0: -4.0}]
    # Means of the last updates: (4 + 8)/4 = 3; (4 + 8 + 4)/4 = 4; (−4 + 8 + 4)/4 = 2.
    assert played(Mifa(), rounds, tmp_path) == [3.0, 7.0, 9.0]
    assert played(Mifa(learning_rate=0.5), rounds, tmp_path) == [1.5, 3.5, 4.5]


def test_mifa_with_wait_changes_the_model_only_after_all_clients_have_sent(tmp_path: Path) -> None:
    rounds = [{0: 4.0, 1: 8.0}, {0: 2.0}, {2: 4.0, 3: 6.0}, {3: 2.0}]
    assert played(Mifa(wait=True), rounds, tmp_path) == [0.0, 0.0, 5.0, 9.0]


def test_mifa_with_wait_does_not_stop_again_for_a_client_that_joins(tmp_path: Path) -> None:
    game, found = Rounds(Mifa(wait=True), vector(0.0), tmp_path), list[float]()
    for clients, each in ((2, {0: 4.0}), (2, {1: 8.0}), (4, {0: 4.0}), (4, {2: 8.0})):
        w = float(game.model["w"][0])
        sent = {f"k{client}": Sent(weights=vector(w + d)) for client, d in each.items()}
        found.append(float(game.play(sent, clients=clients)["w"][0]))
    # (4 + 8)/2 = 6; (4 + 8)/4 = 3; (4 + 8 + 8)/4 = 5.
    assert found == [0.0, 6.0, 9.0, 14.0]


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 2**32), wait=st.booleans())
def test_mifa_equals_a_mean_over_a_table_of_last_updates(
    tmp_path: Path, seed: int, wait: bool
) -> None:
    generator = np.random.default_rng(seed)
    rounds, expected, w = [], [], 0.0
    table: dict[int, float] = {}
    for _ in range(8):
        present = [c for c in range(CLIENTS) if generator.random() < 0.5] or [0]
        each = {client: float(generator.integers(-8, 9)) for client in present}
        table |= each
        if not wait or len(table) == CLIENTS:
            w += sum(table.values()) / CLIENTS
        rounds.append(each)
        expected.append(w)
    assert played(Mifa(wait=wait), rounds, tmp_path) == pytest.approx(expected, abs=1e-4)


def test_mifa_with_a_decaying_learning_rate_gives_a_remark() -> None:
    steady, falling = LocalTraining(), LocalTraining(learning_rate_decay=0.9)
    assert Mifa().review(steady, Weighting.EXACT) == ()
    [remark] = Mifa().review(falling, Weighting.EXACT)
    assert remark.startswith("strategy mifa with a learning rate that falls: ")
