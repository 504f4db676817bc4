"""Cohorts on too few hosts are completed; other cohorts are unchanged."""

from collections.abc import Sequence
from itertools import combinations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from potluck.server.eligibility.host_cover import cover, on_enough_hosts
from potluck.server.selection import Rows


def rows(*numbers: int) -> Rows:
    return np.array(numbers, dtype=np.int64)


def completed(
    chosen: Rows, available: Rows, hosts: Sequence[str], least: int, count: int
) -> Rows | None:
    draw = np.random.default_rng(0)
    return on_enough_hosts(
        chosen, available, hosts=hosts, least=least, count=count, limits=[], draw=draw
    )


def test_cohort_on_enough_hosts_is_returned_unchanged() -> None:
    chosen = rows(3, 0)
    assert completed(chosen, rows(0, 1, 2, 3), "aabb", 2, 2) is chosen


def test_full_cohort_replaces_the_last_selected_client_of_a_host_with_several() -> None:
    found = completed(rows(0, 3, 1, 4), rows(0, 1, 2, 3, 4, 5), "aaabbc", 3, 4)
    assert found is not None
    assert found.tolist() == [0, 3, 1, 5]


def test_cohort_with_free_places_adds_a_client_and_removes_none() -> None:
    found = completed(rows(1, 0), rows(0, 1, 2), "aab", 2, 3)
    assert found is not None
    assert found.tolist() == [1, 0, 2]


def test_no_cohort_is_formed_from_too_few_hosts() -> None:
    assert completed(rows(0, 1), rows(0, 1, 2), "aab", 3, 3) is None


def test_client_of_an_unknown_host_does_not_count_as_a_host() -> None:
    assert completed(rows(0), rows(0, 1), ["", "b"], 2, 2) is None
    found = completed(rows(0, 1), rows(0, 1, 2), ["", "b", "c"], 2, 2)
    assert found is not None
    assert found.tolist() == [1, 2]


@st.composite
def cohorts(draw: st.DrawFn) -> tuple[list[str], list[str], int, list[int], list[int], int]:
    """Draw each client's host, each host's site, the limit per site, available rows, a cohort
    within the limit, and the number of clients asked for."""
    hosts = draw(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=12))
    site_of = {host: draw(st.sampled_from("xyz")) for host in "abcdef"}
    most = draw(st.integers(1, 4))
    available = sorted(draw(st.sets(st.sampled_from(range(len(hosts))), min_size=1)))
    count = draw(st.integers(1, 8))
    chosen = list[int]()
    sites = [site_of[host] for host in hosts]
    for row in draw(st.permutations(available)):
        if len(chosen) < count and sum(sites[each] == sites[row] for each in chosen) < most:
            chosen.append(row)
    return hosts, sites, most, available, chosen, count


@given(cohorts(), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_cohort_is_completed_within_a_tag_limit_if_possible(
    drawn: tuple[list[str], list[str], int, list[int], list[int], int], least: int, seed: int
) -> None:
    hosts, sites, most, available, chosen, count = drawn
    least = min(least, count)
    limits = [(sites, most)]

    def within(some: list[int]) -> bool:
        shared = [sites[row] for row in some]
        return max(map(shared.count, shared)) <= most

    found = on_enough_hosts(
        rows(*chosen),
        rows(*available),
        hosts=hosts,
        least=least,
        count=count,
        limits=limits,
        draw=np.random.default_rng(seed),
    )
    possible = any(
        len({hosts[row] for row in some}) == least and within(list(some))
        for some in combinations(available, least)
    )
    in_order = cover((), available, hosts=hosts, least=least, limits=limits)
    assert (found is not None) == (in_order is not None) == possible
    if found is None:
        return
    cohort = found.tolist()
    assert len(set(cohort)) == len(cohort) <= count
    assert len(cohort) >= len(chosen)
    assert set(cohort) <= set(available)
    assert len({hosts[row] for row in cohort}) >= least
    assert within(cohort)
    kept = [row for row in chosen if row in cohort]
    assert cohort[: len(kept)] == kept
    if len({hosts[row] for row in chosen}) >= least:
        assert cohort == chosen
