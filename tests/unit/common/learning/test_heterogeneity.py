import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import ArrayLike, NDArray

from potluck.common.errors import ConfigurationError
from potluck.common.learning.heterogeneity import federated_heterogeneity, triplet, triplets
from potluck.common.tasks.table6 import NAMES, interaction_matrices


@pytest.mark.parametrize(
    ("matrix", "expected"),
    [
        ([[90, 10], [10, 90]], (0, 0, 0.5310)),
        ([[10, 0], [0, 0]], (1, 1, 0)),
        ([[4, 0], [0, 4]], (0, 0, 1)),
        ([[3, 1], [1, 3]], (0, 0, 0.1887)),
        ([[90, 90], [10, 10]], (0.5310, 0, 0)),
        ([[0, 0], [0, 0]], (0, 0, 0)),
        # the client has two of four classes; CI is relative to all four
        ([[5, 5], [5, 5], [0, 0], [0, 0]], (0.5, 0, 0)),
    ],
)
def test_triplet_of_a_matrix_equals_hand_computed_values(
    matrix: list[list[int]], expected: tuple[float, float, float]
) -> None:
    assert triplet(matrix) == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize(
    ("name", "clients", "samples", "metrics"),
    [
        ("spawrious-gsc", 24, 4800, (0, 0, 0.1634, 0.0885, 0.0885, 0.3540)),
        ("cmnist-gsc", 24, 4800, (0, 0, 0.1634, 0.0885, 0.0885, 0.3540)),
        ("spawrious-gci", 24, 4800, (0.1634, 0, 0, 0.3540, 0.0885, 0.0885)),
        ("spawrious-gai", 25, 4600, (0.0055, 0.4414, 0.0517, 0.2011, 0.4966, 0.1189)),
        ("waterbirds-dist", 30, 4795, (0.2183, 0.1751, 0.6701, 0.2617, 0.2563, 0.7610)),
        ("spawrious-4", 25, 8800, (0, 0, 0.3737, 0.0222, 0.0445, 0.3297)),
        ("spawrious-gci-100", 100, 15600, (0.1488, 0, 0, 0.3043, 0.0716, 0.0716)),
    ],
)
def test_heterogeneity_metrics_equal_table_6_of_the_paper(
    name: str, clients: int, samples: int, metrics: tuple[float, ...]
) -> None:
    """Each row of the table is compared, to four decimals."""
    matrices = interaction_matrices(name)
    assert len(matrices) == clients
    assert matrices.sum() == samples
    found = federated_heterogeneity(matrices)
    values = (found.gci, found.gai, found.gsc, found.cci, found.cai, found.csc)
    assert np.round(values, 4).tolist() == list(metrics)


def test_all_seven_partitions_are_tested() -> None:
    assert len(NAMES) == 7


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("spawrious-gci-100", [[5640, 5640], [2160, 2160]]),
        ("waterbirds-dist", [[3498, 184], [56, 1057]]),  # the training set of WaterBirds
    ],
)
def test_interaction_matrices_have_the_totals_of_the_paper(
    name: str, total: list[list[int]]
) -> None:
    assert interaction_matrices(name).sum(axis=0).tolist() == total


@pytest.mark.parametrize(
    ("name", "types"),
    [
        (
            "spawrious-gai",
            {
                (0.291, 0.541, 0.147),
                (0.578, 0.137, 0.066),
                (0.697, 0.697, 0.238),
                (0.213, 0.213, 0.377),
                (0.468, 0.007, 0.080),
                (0.000, 0.561, 0.063),
                (0.008, 0.663, 0.008),
            },
        ),
        (
            "waterbirds-dist",
            {
                (0.149, 0.280, 0.182),
                (0.280, 0.149, 0.182),
                (0.299, 0.014, 0.270),
                (0.014, 0.299, 0.270),
                (0.179, 0.017, 0.143),
                (0.276, 0.276, 0.871),
                (0.278, 0.278, 0.871),
            },
        ),
        (
            "spawrious-4",
            {(0.139, 0, 0), (0, 0.278, 0), (0, 0, 0.185), (0, 0, 0.504), (0, 0, 0.503)},
        ),
        ("spawrious-gci-100", {(0.448, 0, 0), (0, 0.448, 0), (0, 0, 0.448)}),
    ],
)
def test_triplets_of_a_partition_have_the_published_client_types(
    name: str, types: set[tuple[float, ...]]
) -> None:
    rounded = np.round(triplets(interaction_matrices(name)), 3)
    assert {tuple(row) for row in rounded.tolist()} == types


def test_constant_triplet_predictors_of_waterbirds_have_the_published_errors() -> None:
    """Errors are distances of two constant predictions from the true triplets: the mean and the
    largest."""
    true = triplets(interaction_matrices("waterbirds-dist"))
    median = np.linalg.norm(true - np.median(true, axis=0), axis=1)
    mean = np.linalg.norm(true - true.mean(axis=0), axis=1)
    assert (median.mean(), median.max()) == pytest.approx((0.118, 0.780), abs=5e-4)
    assert (mean.mean(), mean.max()) == pytest.approx((0.193, 0.668), abs=5e-4)


@given(hnp.arrays(np.int64, (3, 4, 2), elements=st.integers(0, 1000)))
def test_triplets_are_between_0_and_1_and_independent_of_class_order(
    matrices: NDArray[np.int64],
) -> None:
    found = triplets(matrices)
    assert ((found >= 0) & (found <= 1)).all()
    np.testing.assert_allclose(triplets(matrices[:, ::-1]), found, atol=1e-12)
    np.testing.assert_allclose(triplets(matrices[:, :, ::-1]), found, atol=1e-12)
    np.testing.assert_allclose(triplets(7 * matrices), found, atol=1e-12)


def test_a_missing_matrix_has_no_triplet() -> None:
    matrices = np.array([[[np.nan, 1], [1, 1]], [[1, 1], [1, 1]]])
    found = triplets(matrices)
    assert np.isnan(found[0]).all()
    assert found[1].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "matrices",
    [[[1, 2], [3, 4]], [[[1, 2, 3], [1, 2, 3]]], [[[1, 2]]], [[[1, -2], [1, 1]]]],
)
def test_matrices_of_wrong_shape_or_with_negative_counts_are_refused(matrices: ArrayLike) -> None:
    with pytest.raises(ConfigurationError, match="matri"):
        triplets(matrices)


def test_heterogeneity_of_an_empty_federation_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="at least one"):
        federated_heterogeneity(np.zeros((0, 2, 2)))


def test_error_about_an_unknown_partition_lists_the_valid_ones() -> None:
    with pytest.raises(ConfigurationError, match="spawrious-gci-100"):
        interaction_matrices("imagenet")
