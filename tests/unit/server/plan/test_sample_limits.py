"""Limits on a client's number of samples, relative to the other clients' numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from potluck.common.run_file.run_settings import SampleLimits
from potluck.experiments.tasks.label_skew import Splitting, split_by
from potluck.server.plan.cohort_limits import counted

MOST = 1 << 40


def counts(samples: list[int], multiple: float = 100.0, maximum: int | None = None) -> list[int]:
    limits = SampleLimits(maximum=maximum, maximum_multiple=multiple)
    found: list[int] = counted(np.array(samples, np.int64), limits).tolist()
    return found


@pytest.mark.parametrize(
    ("samples", "multiple", "maximum", "found"),
    [
        ([], 100, None, []),
        ([MOST], 100, None, [MOST]),
        ([MOST], 100, 5000, [5000]),
        ([MOST, 30], 100, None, [3000, 30]),
        ([30, MOST, 50], 2, None, [30, 80, 50]),
        ([10, 20, 30, MOST], 3, None, [10, 20, 30, 60]),
        ([10, 20, MOST, MOST], 3, None, [10, 20, 60, 60]),
        ([1, 1, 2], 1, None, [1, 1, 1]),
        ([10, 90, 50], 100, 60, [10, 60, 50]),
        ([MOST - 1, MOST, MOST], 1, None, [MOST - 1, MOST - 1, MOST - 1]),
    ],
)
def test_sample_counts_are_limited_by_multiple_and_maximum(
    samples: list[int], multiple: float, maximum: int | None, found: list[int]
) -> None:
    assert counts(samples, multiple, maximum) == found


@given(st.lists(st.integers(1, MOST), min_size=2, max_size=12), st.floats(1, 1000))
def test_sample_count_above_the_bound_from_the_other_clients_is_lowered_to_it(
    samples: list[int], multiple: float
) -> None:
    for place, count in enumerate(counts(samples, multiple)):
        bound = multiple * float(np.median(samples[:place] + samples[place + 1 :]))
        assert 1 <= count <= samples[place]
        assert count <= bound
        if samples[place] <= bound:
            assert count == samples[place]


@given(st.lists(st.integers(1, 10_000), min_size=2, max_size=9), st.integers(1, MOST))
def test_client_that_reports_too_many_samples_can_not_raise_its_own_bound(
    honest: list[int], lie: int
) -> None:
    assert counts([*honest, lie])[-1] <= 100 * max(honest)


LABELS: NDArray[np.int64] = np.repeat(np.arange(10), 5000)


@pytest.mark.parametrize(
    "split",
    [
        {"partition": "dirichlet", "alpha": 0.1},
        {"partition": "dirichlet", "alpha": 0.5},
        {"partition": "labels"},
        {"partition": "one-class"},
        {"partition": "uniform"},
    ],
    ids=str,
)
def test_sample_counts_of_published_partitions_are_not_lowered(
    split: dict[str, str | float],
) -> None:
    parts = split_by(Splitting(**split), LABELS)  # type: ignore[arg-type]  # values of several types
    sizes = np.array([len(part) for part in parts], np.int64)
    generator = np.random.default_rng(3)
    for _ in range(200):
        cohort = generator.choice(sizes, 10, replace=False)
        assert counts(cohort.tolist()) == cohort.tolist()
