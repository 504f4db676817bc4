from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.common.errors import ProtocolError
from potluck.common.names import check_tags
from potluck.server.plan.cohort_limits import ineligible, narrowed
from potluck.server.selection import Rows


def rows(*numbers: int) -> Rows:
    return np.array(numbers, dtype=np.int64)


def test_site_limit_keeps_the_clients_selected_first() -> None:
    sites = ["a", "a", "a", "b", "b", "c"]
    fewer = narrowed(rows(2, 0, 3, 1), rows(0, 1, 2, 3, 4, 5), [(sites, 2)])
    assert fewer is not None
    assert fewer.tolist() == [0, 2, 3, 4, 5]
    assert narrowed(rows(2, 0, 3, 5), fewer, [(sites, 2)]) is None


def test_cohort_is_unchanged_without_tag_limits() -> None:
    assert narrowed(rows(0, 1), rows(0, 1), []) is None


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xy")), min_size=1, max_size=30),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 12),
    st.integers(0, 2**32 - 1),
)
def test_repeated_selection_ends_within_the_tag_limits(
    tags: list[tuple[str, str]], per_site: int, per_scanner: int, count: int, seed: int
) -> None:
    limits = [([site for site, _ in tags], per_site), ([kind for _, kind in tags], per_scanner)]
    draw = np.random.default_rng(seed)
    choose: Callable[[Rows], Rows] = lambda among: draw.permutation(among)[:count]  # noqa: E731  # as selectors are, another each time
    available = np.arange(len(tags))
    for _ in range(len(tags) + 1):
        chosen = choose(available)
        fewer = narrowed(chosen, available, limits)
        if fewer is None:
            break
        assert set(fewer) < set(available)
        available = fewer
    else:
        raise AssertionError("did not end")
    assert len(chosen)
    for values, most in limits:
        shared = [values[row] for row in chosen]
        assert max(map(shared.count, shared)) <= most


def test_client_is_eligible_if_each_tag_of_its_host_has_an_allowed_value() -> None:
    eligible = {"site": ("north", "south"), "scanner": ("3t",)}
    assert not ineligible({"site": "south", "scanner": "3t", "floor": "2"}, eligible)
    assert not ineligible({}, {})
    assert "tag scanner of the host is '7t'" in ineligible(
        {"site": "north", "scanner": "7t"}, eligible
    )
    assert "tag site of the host is not set" in ineligible({"scanner": "3t"}, eligible)


@pytest.mark.parametrize(
    "tags",
    [
        {"Site": "a"},
        {"site": ""},
        {"site": "a" * 65},
        {"site": "a\n"},
        {f"t{number}": "a" for number in range(33)},
    ],
)
def test_invalid_host_tags_are_refused_naming_the_host(tags: dict[str, str]) -> None:
    with pytest.raises(ProtocolError, match="host 'h'"):
        check_tags(tags, host_name="h")
    assert check_tags({"site": "Köln 2"}, host_name="h") == {"site": "Köln 2"}
