"""Runs that select by the tags of hosts: site a has the hosts 0 and 1, site b has host 2."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from support.federation import Federation, crash_federation, set_values, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

SITES = ("a", "a", "b")
ONE_PER_SITE = "selector_limits.at_most_per={site = 1}"
ASKING = 'selector.name="asking"'


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Federation]:
    folder = tmp_path_factory.mktemp("tags")
    async with crash_federation(folder, rounds=2, start_hosts=False) as federation:
        for number, site in enumerate(SITES):
            set_values(federation.files.hosts[number], {"tags": {"site": site}})
        await federation.start_hosts()
        await federation.until_attending()
        yield federation


@pytest_asyncio.fixture(loop_scope="module")
async def federation(shared: Federation) -> Federation:
    shared.points.clear()
    return shared


async def sites(federation: Federation, run_id: str) -> list[list[str]]:
    """Return the sites of each round's cohort, in the order of selection."""
    clients = await federation.operator.list_clients()
    site_of = {client.client_id: client.tags["site"] for client in clients}
    history = await federation.history(run_id)
    return [[site_of[member.client_id] for member in each.members] for each in history]


async def test_only_hosts_with_eligible_tags_take_part(federation: Federation) -> None:
    run_id = await federation.start_run(
        'selector_limits.eligible={site = ["b"]}', "clients_per_round=2"
    )
    await federation.finished(run_id)
    assert await sites(federation, run_id) == [["b", "b"]] * 2


async def test_host_restarted_with_an_eligible_tag_takes_part(federation: Federation) -> None:
    federation.points.hold("train-client-4")
    run_id = await federation.start_run('selector_limits.eligible={site = ["b", "c"]}')
    await until(lambda: federation.points.reached("train-client-4"))
    await restarted(federation, 1, site="c")
    federation.points.release()
    await federation.finished(run_id)
    first, second = await sites(federation, run_id)
    assert first == ["b", "b"]
    assert sorted(second) == ["b", "b", "c", "c"]
    await restarted(federation, 1, site="a")


async def restarted(federation: Federation, number: int, *, site: str) -> None:
    """Restart a host with another tag."""
    await federation.kill_host(number)
    await federation.until_attending(len(SITES) - 1)
    set_values(federation.files.hosts[number], {"tags": {"site": site}})
    await federation.processes.start_host(number)
    await federation.until_attending()


@pytest.mark.parametrize("selector", ['selector.name="crash"', ASKING])
async def test_cohort_has_at_most_the_allowed_clients_per_site(
    federation: Federation, selector: str
) -> None:
    run_id = await federation.start_run("selector_limits.at_most_per={site = 2}", selector)
    await federation.finished(run_id)
    for cohort in await sites(federation, run_id):
        assert Counter(cohort) == {"a": 2, "b": 2}
    run_id = await federation.start_run(ONE_PER_SITE, selector)
    await federation.finished(run_id)
    for cohort in await sites(federation, run_id):
        assert Counter(cohort) == {"a": 1, "b": 1}


@pytest.mark.parametrize("point", ["answer-2", "weigh"])
async def test_killed_coordinator_selects_the_same_clients(
    federation: Federation, point: str
) -> None:
    undisturbed = await federation.finished(await federation.start_run(ONE_PER_SITE, ASKING))
    lines = (federation.points.folder / "observed").read_text().splitlines()
    federation.points.clear()
    federation.points.kill(point)
    run_id = await federation.start_run(ONE_PER_SITE, ASKING)
    assert await federation.coordinator.ended() == 137
    await federation.restart_coordinator()
    assert await federation.finished(run_id) == undisturbed
    assert (federation.points.folder / "observed").read_text().splitlines() == lines
