"""Numbers computed from the papers' definitions, for claims the papers make or omit."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from numpy.typing import NDArray
from support.populations import labelled, rounds, table_6

from potluck.common.learning.heterogeneity import triplet, triplets
from potluck.server.selectors.dc import DcBalanced
from potluck.server.selectors.fedentopt import FedEntOpt

Floats = NDArray[np.float64]


def all_two_by_two(samples: int) -> NDArray[np.int64]:
    """Return every 2 × 2 interaction matrix of `samples` samples."""
    first, second, third = np.meshgrid(*[np.arange(samples + 1)] * 3, indexing="ij")
    kept = first + second + third <= samples
    cells = [part[kept] for part in (first, second, third)]
    return np.stack([*cells, samples - sum(cells)], axis=-1).reshape(-1, 2, 2)


@pytest.mark.parametrize(
    "matrix", [[[110, 23], [10, 23]], [[89, 39], [1, 29]], [[81, 35], [9, 31]], [[126, 1], [1, 31]]]
)
def test_triplet_and_sample_count_determine_the_interaction_matrix(matrix: list[list[int]]) -> None:
    """They determine it except for the order of rows and columns, even rounded to two decimals."""
    candidates = all_two_by_two(int(np.sum(matrix)))
    assert 657_000 <= len(candidates) < 791_000
    all_triplets, own = triplets(candidates), np.array(triplet(matrix))
    exact = candidates[(np.abs(all_triplets - own) < 1e-9).all(axis=1)]
    relabelled = [np.array(matrix)[rows][:, columns] for rows in ([0, 1], [1, 0])
                  for columns in ([0, 1], [1, 0])]  # fmt: skip
    assert sorted(exact.tolist()) == sorted(each.tolist() for each in relabelled)
    by_decimals = {
        decimals: int((all_triplets.round(decimals) == own.round(decimals)).all(axis=1).sum())
        for decimals in (2, 1)
    }
    assert by_decimals[2] == 4
    assert 136 <= by_decimals[1] <= 9044


def test_one_sample_can_change_the_spurious_correlation_from_0_to_1() -> None:
    assert triplet([[150, 0], [0, 0]])[2] == 0
    assert triplet([[150, 0], [0, 1]])[2] == pytest.approx(1)
    moved = triplet([[150, 0], [0, 0]])[0] - triplet([[150, 0], [0, 1]])[0]
    assert moved == pytest.approx(0.0575, abs=5e-4)


def test_client_types_of_spawrious_gai_have_the_computed_shares() -> None:
    """Figure 7's 12, 60 and 8 % don't sum to 100 %: some clients are equally of two types."""
    federation = np.array(table_6("spawrious-gai").triplets)
    largest = federation.max(axis=1, keepdims=True)
    types = Counter(
        "CI/AI" if (row[:2] >= top - 1e-9).all() else ("CI", "AI", "SC")[int(np.argmax(row))]
        for row, top in zip(federation, largest, strict=True)
    )
    shares = {name: count / len(federation) for name, count in types.items()}
    assert shares == pytest.approx({"AI": 0.64, "CI": 0.12, "SC": 0.08, "CI/AI": 0.16})


def test_clients_of_spawrious_4_differ_in_size_fivefold() -> None:
    sizes = np.asarray(table_6("spawrious-4").interaction_matrices).sum(axis=(1, 2))
    assert (sizes.min(), sizes.max()) == (100, 496)


def test_partition_of_spawrious_gci_over_100_clients_fits_its_images() -> None:
    cells = np.asarray(table_6("spawrious-gci-100").interaction_matrices).sum(axis=0)
    assert cells.tolist() == [[5640, 5640], [2160, 2160]]
    assert cells.max() <= 5702


@pytest.mark.parametrize(("alpha", "least", "most"), [(0.1, 0, 0), (0.2, 0, 0), (2.0, 0.005, 0.15)])
def test_early_stop_share_of_dc_balanced_depends_on_label_skew(
    alpha: float, least: float, most: float
) -> None:
    """Stopping early only matters where clients are nearly alike: equal ones always stop."""
    shares = np.random.default_rng(5).dirichlet([alpha] * 100, 10).T
    federation = labelled((shares * 6000).round().tolist())
    chosen = rounds(DcBalanced(stop_early=True), federation, 15, 300)
    stopped = np.mean([len(selection.rows) < 15 for selection in chosen])
    assert least <= stopped <= most


def test_fedentopt_cohort_of_four_two_label_clients_covers_eight_labels() -> None:
    counts = np.zeros((100, 10))
    for client in range(100):
        counts[client, [client % 10, (client + 1 + client // 10 % 9) % 10]] = 250
    for selection in rounds(FedEntOpt(buffer=50), labelled(counts.tolist()), 4, 20):
        assert np.count_nonzero(counts[selection.rows].sum(axis=0)) == 8
