import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from potluck.common.errors import ConfigurationError
from potluck.common.names import ClientId
from potluck.common.tasks.partition import (
    by_counts,
    dirichlet,
    held_out_split,
    part_number,
    scaled,
    stratified,
)


def entropy(counts: NDArray[np.int64]) -> float:
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


@pytest.mark.parametrize(
    ("client", "part"), [("client-7", 7), ("client-07", 7), ("a23", 23), ("0", 0)]
)
def test_number_at_the_end_of_a_client_id_selects_its_part(client: str, part: int) -> None:
    assert part_number(ClientId(client), 24, task="digits") == part


@pytest.mark.parametrize("client", ["client-24", "client", "7-client"])
def test_client_id_without_a_part_is_refused_naming_the_client(client: str) -> None:
    expected = rf"digits has parts for client-0 … client-23, not for '{client}'; rename"
    with pytest.raises(ConfigurationError, match=expected):
        part_number(ClientId(client), 24, task="digits")


@settings(deadline=None, max_examples=50)
@given(
    clients=st.integers(1, 30),
    alpha=st.floats(0.01, 100),
    seed=st.integers(0, 2**32),
    minimum=st.integers(0, 10),
)
def test_a_dirichlet_partition_is_complete_disjoint_and_repeatable(
    clients: int, alpha: float, seed: int, minimum: int
) -> None:
    labels = np.arange(400) % 7
    parts, again = (
        dirichlet(labels, clients, alpha, np.random.default_rng(seed), minimum=minimum)
        for _ in range(2)
    )
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(400))
    assert len(parts) == clients
    assert min(len(part) for part in parts) >= minimum
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


def test_a_smaller_alpha_gives_more_skewed_clients() -> None:
    labels = np.arange(4000) % 10

    def mean_entropy(alpha: float) -> float:
        parts = dirichlet(labels, 10, alpha, np.random.default_rng(0))
        return float(np.mean([entropy(np.bincount(labels[part])) for part in parts]))

    assert mean_entropy(0.1) < mean_entropy(0.5) < mean_entropy(10) < np.log2(10)


def test_dirichlet_partition_over_too_many_clients_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="100 samples are too few for 11 clients"):
        dirichlet(np.zeros(100, dtype=np.int64), 11, 1.0, np.random.default_rng(0))


@given(
    cells=st.lists(st.integers(0, 1000), min_size=4, max_size=4).filter(any),
    total=st.integers(0, 500),
)
def test_scaled_matrix_has_the_total_with_rounding_errors_below_one(
    cells: list[int], total: int
) -> None:
    matrix = np.array(cells).reshape(2, 2)
    counts = scaled(matrix, total)
    assert counts.sum() == total
    assert np.abs(counts - matrix * total / matrix.sum()).max() < 1


def test_table_6_matrix_scaled_to_58_samples_has_the_expected_counts() -> None:
    assert scaled(np.array([[90, 90], [10, 10]]), 58).tolist() == [[26, 26], [3, 3]]


def test_partition_by_counts_gives_each_client_its_counts() -> None:
    values = np.array([0, 1, 2] * 10)
    counts = np.array([[1, 2, 3], [9, 0, 0], [0, 8, 7]])
    parts = by_counts(values, counts, np.random.default_rng(0))
    assert [np.bincount(values[part], minlength=3).tolist() for part in parts] == counts.tolist()
    assert len(np.unique(np.concatenate(parts))) == counts.sum()
    assert (np.diff(values[parts[0]]) >= 0).all()


def test_partition_by_more_counts_than_samples_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="6 samples of value 1, but there are only 5"):
        by_counts(np.array([1] * 5), np.array([[0, 3], [0, 3]]), np.random.default_rng(0))


def test_stratified_choice_has_equally_many_samples_of_each_class() -> None:
    labels = np.array([0] * 30 + [1] * 12 + [2] * 20)
    rest, chosen = stratified(labels, 10, np.random.default_rng(0))
    assert np.bincount(labels[chosen]).tolist() == [10, 10, 10]
    assert np.array_equal(np.sort(np.concatenate([rest, chosen])), np.arange(62))


@pytest.mark.parametrize(("share", "held_out"), [(0.0, 0), (0.2, 4), (0.5, 10)])
def test_held_out_split_takes_the_share_of_a_part(share: float, held_out: int) -> None:
    part = np.arange(100, 121)
    train, rest = held_out_split(part, share, np.random.default_rng(0))
    assert (len(train), len(rest)) == (21 - held_out, held_out)
    assert np.array_equal(np.sort(np.concatenate([train, rest])), part)
