"""Data splits of the papers: the guarantees of each rule."""

from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from potluck.common.errors import ConfigurationError
from potluck.common.settings.plugins import create
from potluck.common.task import Task
from potluck.common.tasks.partition import Indices
from potluck.experiments.tasks.label_skew import (
    Splitting,
    few_labels,
    mostly_one_class,
    split_by,
    uneven_sizes,
    used,
    without_drop,
)


def balanced(classes: int, each: int) -> NDArray[np.int64]:
    return np.random.default_rng(0).permutation(np.repeat(np.arange(classes), each))


def assert_disjoint(parts: list[Indices]) -> None:
    together = np.concatenate(parts)
    assert len(np.unique(together)) == len(together)


@settings(deadline=None, max_examples=40)
@given(clients=st.integers(1, 40), per_client=st.integers(1, 5), seed=st.integers(0, 2**32 - 1))
def test_few_labels_split_gives_every_client_the_number_of_labels(
    clients: int, per_client: int, seed: int
) -> None:
    labels = balanced(5, 80)
    parts = few_labels(labels, clients, per_client, np.random.default_rng(seed))
    assert_disjoint(parts)
    for client, part in enumerate(parts):
        held = np.unique(labels[part])
        assert len(held) == per_client
        assert client % 5 in held
    for label in range(5):
        counts = [int(np.sum(labels[part] == label)) for part in parts if label in labels[part]]
        assert not counts or (sum(counts) == 80 and max(counts) - min(counts) <= 1)


def test_more_labels_per_client_than_classes_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="can't have 6 of 5 classes"):
        few_labels(balanced(5, 10), 4, 6, np.random.default_rng(0))


@settings(deadline=None, max_examples=40)
@given(skewed=st.floats(0, 1), seed=st.integers(0, 2**32 - 1))
def test_mostly_one_class_split_skews_the_given_share_of_clients(skewed: float, seed: int) -> None:
    labels = balanced(10, 500)
    parts = mostly_one_class(labels, 50, skewed, np.random.default_rng(seed))
    assert_disjoint(parts)
    assert {len(part) for part in parts} == {100}
    highest = [np.bincount(labels[part], minlength=10).max() for part in parts]
    assert sum(count >= 80 for count in highest) >= int(skewed * 50 + 0.5)
    assert sum(count >= 60 for count in highest) == int(skewed * 50 + 0.5)


@settings(deadline=None, max_examples=40)
@given(clients=st.integers(1, 30), alpha=st.floats(0.01, 10), seed=st.integers(0, 2**32 - 1))
def test_uneven_sizes_split_uses_all_samples(clients: int, alpha: float, seed: int) -> None:
    parts = uneven_sizes(600, clients, alpha, np.random.default_rng(seed))
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(600))
    assert min(len(part) for part in parts) >= 10


@settings(deadline=None, max_examples=40)
@given(alpha=st.floats(0.05, 10), seed=st.integers(0, 2**32 - 1))
def test_dropped_samples_sum_to_the_size_of_one_class(alpha: float, seed: int) -> None:
    labels = balanced(10, 200)
    kept = without_drop(labels, alpha, np.random.default_rng(seed))
    dropped = 200 - np.bincount(labels[kept], minlength=10)
    assert abs(int(dropped.sum()) - 200) <= 10  # rounding changes at most half a sample per class


@pytest.mark.parametrize("kind", get_args(get_type_hints(Splitting)["partition"]))
def test_partition_depends_only_on_seed_and_labels(kind: Any) -> None:
    labels = balanced(10, 60)

    def split(seed: int) -> list[list[int]]:
        options = Splitting(clients=12, partition=kind, seed=seed, samples=500, global_alpha=2.0)
        return [part.tolist() for part in split_by(options, labels)]

    assert split(3) == split(3)
    assert split(3) != split(4)
    assert_disjoint([np.array(part) for part in split(3)])


def test_used_samples_are_balanced_over_classes() -> None:
    labels = balanced(10, 60)
    chosen = used(labels, 205, np.random.default_rng(0))
    assert len(chosen) == 205
    assert set(np.bincount(labels[chosen])) <= {18, 19, 20, 21}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"partition": "random"}, "'partition' is 'random'; it must be 'uniform', 'dirichlet'"),
        ({"clients": 0}, "'clients' is 0; it must be greater than 0"),
        ({"alpha": 0}, "'alpha' is 0; it must be greater than 0"),
        ({"skewed": 1.5}, "'skewed' is 1.5; it must be less than or equal to 1"),
        ({"samples": -1}, "'samples' is -1; it must be greater than or equal to 0"),
    ],
)
def test_split_options_out_of_range_are_refused_naming_them(
    options: dict[str, float], why: str
) -> None:
    with pytest.raises(ConfigurationError, match=why):
        create(Task, "mnist", options)
