from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from support.populations import labelled, population, rounds, table_6

from potluck.deploy.view.selection_plots import (
    CORNERS,
    client_groups,
    dominant_heterogeneity,
    plot_selection,
    ternary_points,
)
from potluck.server.live.cohort_labels import cohort_labels
from potluck.server.selection import Population
from potluck.server.selectors.uniform import Uniform

TRIPLETS = [[1, 0, 0], [0, 0, 0], [np.nan] * 3, [0.2, 0.1, 0.7]]


def test_cohort_labels_have_entropy_and_distance_to_balanced() -> None:
    counts = np.array([[4.0, 0], [0, 4], [6, 2], [np.nan, np.nan]])
    found = cohort_labels(
        counts, {1: np.array([0, 1]), 2: np.array([0]), 3: np.array([0, 3]), 4: np.array([3])}
    )
    np.testing.assert_allclose(found.entropy, [1, 0, 0, np.nan])
    np.testing.assert_allclose(
        found.to_balanced, [0, 1 - 0.5**0.5, 1 - 0.5**0.5, np.nan], atol=1e-12
    )
    to_sum = 1 - np.array([4, 4]) @ [10, 6] / (np.hypot(4, 4) * np.hypot(10, 6))
    assert found.to_federation[0] == pytest.approx(to_sum)


def test_clients_are_grouped_by_their_dominant_heterogeneity() -> None:
    rows = [[0.5, 0.1, 0.2], [0, 0.3, 0.2], [0.1, 0.1, 0.9], [0, 0, 0], [np.nan] * 3]
    groups = dominant_heterogeneity(population(5, triplet_rows=np.array(rows)))
    assert groups.tolist() == [0, 1, 2, 3, 4]
    from_matrices = population(1, matrices=[[[90, 10], [10, 90]]])
    assert dominant_heterogeneity(from_matrices).tolist() == [2]


def test_clients_are_grouped_by_their_main_label_without_triplets() -> None:
    counts: list[list[float]] = [[5.0, 1, 0], [1, 1, 7], [2, 2, 0]]
    counts += [[0, 0, 0], [np.nan] * 3, [-4, -2, -1]]
    groups, named = client_groups(labelled(counts))
    names = [named[group][0] for group in groups]
    assert names[:3] == ["mostly class 0", "mostly class 2", "mostly class 0"]
    assert set(names[3:]) == {"no label counts"}
    groups, named = client_groups(table_6("waterbirds-dist"))
    assert "spurious correlation" in {named[group][0] for group in groups}
    groups, named = client_groups(population(2))
    assert {named[group][0] for group in groups} == {"no triplet"}


def test_triplets_are_placed_in_the_ternary_plot() -> None:
    points = ternary_points(np.array([[0.3, 0, 0], [0, 1, 0], [0, 0, 0.1], [0, 0, 0], [1, 1, 0]]))
    np.testing.assert_allclose(points[:3], CORNERS)
    np.testing.assert_allclose(points[3], CORNERS.mean(axis=0))
    np.testing.assert_allclose(points[4], [0.5, 0], atol=1e-12)


@pytest.mark.parametrize(
    "federation",
    [
        table_6("waterbirds-dist"),
        labelled([[1, 0], [0, 1], [3, 3]]),
        population(60),
        population(4, triplet_rows=np.array(TRIPLETS)),
    ],
    ids=["everything", "labels only", "nothing", "triplets only"],
)
def test_selection_plot_is_drawn_for_any_available_profiles(
    federation: Population, tmp_path: Path
) -> None:
    path = tmp_path / "selection.png"
    cohorts = {
        number: selection.rows
        for number, selection in enumerate(rounds(Uniform(), federation, 3, 5), start=1)
    }
    plot_selection(federation, cohorts, path, title="uniform: 3 clients a round")
    pixels = imread(path)[..., :3]
    assert (pixels.min(axis=2) < 0.9).mean() > 0.01
