"""Clients of a cohort that may be trained together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from potluck.server.eligibility.host_cover import LARGEST_GROUP, companions


def test_clients_of_one_host_form_a_group_in_the_order_given() -> None:
    where = {"c": "north", "a": "south", "b": "north", "d": "east"}
    found = companions((client, host, None) for client, host in where.items())
    assert found == {"c": ("c", "b"), "b": ("c", "b")}


def test_clients_of_unknown_hosts_are_not_grouped() -> None:
    assert companions([("a", "", None), ("b", "", None)]) == {}


def test_clients_with_different_numbers_of_passes_are_not_grouped() -> None:
    found = companions([("a", "north", None), ("b", "north", 3), ("c", "north", 3)])
    assert found == {"b": ("b", "c"), "c": ("b", "c")}


def test_many_clients_of_a_host_form_several_groups() -> None:
    clients = [f"client-{number}" for number in range(LARGEST_GROUP + 3)]
    found = companions((client, "host", None) for client in clients)
    assert found[clients[0]] == tuple(clients[:LARGEST_GROUP])
    assert found[clients[-1]] == tuple(clients[LARGEST_GROUP:])


@given(st.lists(st.integers(0, 3), max_size=300))
def test_all_members_of_a_group_are_mapped_to_the_same_group(hosts: list[int]) -> None:
    where = {f"client-{number}": f"host-{host}" for number, host in enumerate(hosts)}
    found = companions((client, host, None) for client, host in where.items())
    for client, group in found.items():
        assert client in group
        assert 1 < len(group) <= LARGEST_GROUP
        assert all(found[each] == group and where[each] == where[client] for each in group)
