"""The cohort of a masked round: on enough hosts for its sum, or the round waits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from support.eligibility import selecting
from support.populations import population

from potluck.server.eligibility.eligibility import ScarceError
from potluck.server.hosts.attendance import Attendance, HostSession
from potluck.server.live.selecting import Selecting
from potluck.server.machine.roster import RunRoster
from potluck.server.plan.plan import RunPlan, draw_up
from potluck.server.select.cohort_hosts import check_hosts, complete
from potluck.server.selection import Rows, Selection, SelectionContext
from potluck.server.store import Store

MASKED = (
    'clients_per_round = 10\nsecure_aggregation = true\n[task]\nname = "digits"\nclients = 12\n'
)


@dataclass
class Scene:
    """A run whose clients are on hosts."""

    plan: RunPlan
    selecting: Selecting

    def check(self, available: Rows) -> None:
        check_hosts(self.selecting, self.plan, 3, available)

    def complete(self, selection: Selection, context: SelectionContext) -> Selection:
        return complete(self.selecting, self.plan, selection, context)


def run_on(
    hosts: Sequence[str],
    run_file: str = MASKED,
    tags: Mapping[str, Mapping[str, str]] | None = None,
) -> Scene:
    """Return a run in which client i is on `hosts[i]`. tags: tags of hosts, by host."""
    plan, attendance = draw_up(run_file, source="test"), Attendance(lambda: 0.0)
    roster = RunRoster([f"k{row:02}" for row in range(len(hosts))])
    host_of = dict(zip(roster.ids, hosts, strict=True))
    for host in sorted(set(hosts)):
        clients = tuple(client for client in roster.ids if host_of[client] == host)
        attendance.attach(
            HostSession(
                host_id=host,
                client_ids=clients,
                device="cpu",
                tasks=frozenset(),
                tags=dict((tags or {}).get(host, {})),
            )
        )
    found = selecting(plan, roster, attendance, no_store)
    found.eligibility.host_of = host_of.__getitem__
    return Scene(plan, found)


async def no_store(_: Callable[[Store], Any]) -> Any:
    raise AssertionError("the store was asked")


def chosen(*rows: int) -> Selection:
    return Selection(rows=np.array(rows), reasons=[f"choice {place}" for place in range(len(rows))])


def context(clients: int, count: int) -> SelectionContext:
    return SelectionContext(
        round=3, seed=1, count=count, population=population(clients), available=np.arange(clients)
    )


def test_unmasked_cohort_is_unchanged() -> None:
    run = run_on("a" * 12, MASKED.replace("true", "false"))
    run.check(np.arange(12))
    selection = chosen(*range(10))
    assert run.complete(selection, context(12, 10)) is selection


def test_masked_cohort_on_enough_hosts_is_unchanged() -> None:
    selection = chosen(*range(10))
    assert run_on("abcdeabcdeab").complete(selection, context(12, 10)) is selection


def test_client_added_to_cover_hosts_has_that_as_its_reason() -> None:
    found = run_on("aaabbbccddde").complete(chosen(*range(10)), context(12, 10))
    assert found.rows.tolist() == [*range(9), 11]
    assert found.reasons == [*chosen(*range(9)).reasons, "needed for 5 hosts"]


def test_over_selected_clients_are_replaced_until_enough_hosts_are_covered() -> None:
    # The 12 clients chosen are on five hosts, 8 of them on one. The round closes at ten updates, so
    # one of the 8 is replaced by a client on a sixth host.
    spare = MASKED + "[round]\nover_selection = 2\n"
    found = run_on("aaaaaaaabcdefg", spare).complete(chosen(*range(12)), context(14, 12))
    assert found.rows.tolist()[:11] == [*range(7), *range(8, 12)]
    assert found.reasons[11] == "needed for 6 hosts"


def test_minimum_of_hosts_is_one_more_than_the_colluding_hosts() -> None:
    run = run_on("abcdefabcdef", MASKED + "[masking]\ncolluding_hosts = 5\n")
    found = run.complete(chosen(*range(5), *range(6, 11)), context(12, 10))
    assert found.rows.tolist()[-1] in (5, 11)
    assert found.reasons[-1] == "needed for 6 hosts"


@pytest.mark.parametrize(
    ("tables", "why"),
    [
        ("", "round 3: 8 clients on 4 hosts may be selected, but .* on 5 hosts; start more hosts$"),
        (
            "[masking]\nhosts = 3\n[selector_limits.at_most_per]\nsite = 1\n",
            "a cohort on 3 hosts within selector_limits.at_most_per; .* or raise these limits$",
        ),
    ],
)
def test_masked_round_waits_if_clients_are_on_too_few_hosts(tables: str, why: str) -> None:
    sites = {host: {"site": "north" if host < "c" else "south"} for host in "abcd"}
    run = run_on("aabbccdd", MASKED + tables, sites)
    with pytest.raises(ScarceError, match=why):
        run.check(np.arange(8))
