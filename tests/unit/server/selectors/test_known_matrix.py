import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from support.populations import population, rounds, table_6

from potluck.common.tasks.table6 import NAMES, interaction_matrices
from potluck.server.selectors.known_matrix import RIDGE, KnownMatrix, minimum_variance_weights

Floats = NDArray[np.float64]


def flat(name: str) -> Floats:
    matrices = interaction_matrices(name)
    return matrices.reshape(len(matrices), -1).astype(np.float64)


def is_optimal(vectors: Floats, weights: Floats) -> bool:
    """Check the Karush–Kuhn–Tucker conditions: one gradient on the support, none below it."""
    centred = vectors - vectors.mean(axis=1, keepdims=True)
    gradient = 2 * centred @ (weights @ centred) / vectors.shape[1] + 2 * RIDGE * weights
    level = weights @ gradient
    scale = 1e-6 * max(float(np.square(centred).max()), 1.0)
    on_support = np.abs(gradient[weights > 0] - level) <= scale
    return bool(on_support.all() and (gradient >= level - scale).all())


def test_minimum_variance_weights_of_waterbirds_use_three_clients() -> None:
    vectors = flat("waterbirds-dist")
    weights = minimum_variance_weights(vectors)
    assert np.sort(weights)[-4:].round(3).tolist() == [0, 0.161, 0.197, 0.642]
    assert (weights @ vectors).var() == pytest.approx(443.9, abs=0.05)
    assert vectors.mean(axis=0).var() == pytest.approx(2122.8, abs=0.05)


def test_minimum_variance_weights_of_spawrious_gai_use_five_clients() -> None:
    assert np.count_nonzero(minimum_variance_weights(flat("spawrious-gai"))) == 5


@pytest.mark.parametrize(
    "name", [n for n in NAMES if n not in ("waterbirds-dist", "spawrious-gai")]
)
def test_minimum_variance_weights_of_other_federations_use_all_clients(name: str) -> None:
    vectors = flat(name)
    weights = minimum_variance_weights(vectors)
    assert (weights > 0).all()
    assert (weights @ vectors).var() < 1e-12


def test_clients_with_equal_matrices_have_equal_weights() -> None:
    weights = minimum_variance_weights(np.tile([3.0, 1.0, 4.0, 1.0], (7, 1)))
    np.testing.assert_allclose(weights, 1 / 7, rtol=1e-9)


@settings(max_examples=50, deadline=None)
@given(hnp.arrays(np.float64, (12, 6), elements=st.integers(0, 300).map(float)))
def test_minimum_variance_weights_are_optimal(vectors: Floats) -> None:
    weights = minimum_variance_weights(vectors)
    assert (weights >= 0).all()
    assert weights.sum() == pytest.approx(1)
    assert is_optimal(vectors, weights)


@pytest.mark.parametrize("bias", [0.0, 500.0])
def test_minimum_variance_weights_of_5000_clients_are_optimal(bias: float) -> None:
    """There are more clients than the search starts from; all or few have a weight."""
    generator = np.random.default_rng(1)
    vectors = generator.integers(0, 200, (5000, 8)) * generator.dirichlet([0.3] * 8, 5000)
    vectors[:, 0] += bias
    weights = minimum_variance_weights(vectors)
    assert is_optimal(vectors, weights)
    assert np.count_nonzero(weights) == (5000 if bias == 0 else pytest.approx(8, abs=8))


def test_known_matrix_selects_weighted_clients_first_and_fills_uniformly() -> None:
    for selection in rounds(KnownMatrix(), table_6("waterbirds-dist"), 9, 20):
        assert len(selection.rows) == 9
        assert {reason.split(", ")[1] for reason in selection.reasons[:3]} == {"one of 3"}
        assert set(selection.reasons[3:]) == {"no weight; drawn uniformly"}


def test_known_matrix_draws_clients_in_proportion_to_their_weights() -> None:
    matrices = np.array([[[30, 0], [0, 0]], [[0, 10], [10, 10]]])
    federation = population(2, matrices=matrices)
    firsts = [selection.rows[0] for selection in rounds(KnownMatrix(), federation, 1, 2000)]
    assert np.mean(np.array(firsts) == 1) == pytest.approx(0.75, abs=0.03)


def test_known_matrix_selects_clients_without_a_matrix_last() -> None:
    matrices = np.array([[[1.0, 2.0], [2.0, 1.0]]] * 3)
    matrices[1] = np.nan
    for selection in rounds(KnownMatrix(), population(3, matrices=matrices), 3, 10):
        assert selection.rows[2] == 1
