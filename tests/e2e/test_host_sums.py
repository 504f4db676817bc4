"""Hosts send one exact sum of their clients' updates; the model is the same however they group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from support.federation import Federation, crash_federation

SUMS = ("host_sums.enabled=true", 'selector.name="uniform"')
STRATEGIES = {
    "fedavg": ('strategy.name="fedavg"',),
    "fednova": ('strategy.name="fednova"', "training.momentum=0.5"),
    "fedadam": ('strategy.name="fedadam"', 'weighting="equal"'),
    "scaffold": ('strategy.name="scaffold"',),
}


async def digests(federation: Federation, names: Sequence[str]) -> Mapping[str, str]:
    """The last model by strategy."""
    found = {}
    for name in names:
        run_id = await federation.start_run(*SUMS, *STRATEGIES[name])
        found[name] = await federation.finished(run_id)
    return found


async def bytes_up(federation: Federation, *assignments: str) -> int:
    run_id = await federation.start_run('strategy.name="fedavg"', *assignments)
    await federation.finished(run_id)
    return sum(each.bytes_up for each in await federation.history(run_id))


@pytest.mark.slow
async def test_any_grouping_gives_the_same_model(tmp_path: Path) -> None:
    found = []
    for hosts in (1, 4):  # a sum of six; two of two and two of one
        folder = tmp_path / str(hosts)
        folder.mkdir()
        async with crash_federation(
            folder, clients=6, hosts=hosts, count=6, rounds=2
        ) as federation:
            found.append(await digests(federation, list(STRATEGIES)))
            if hosts == 1:
                assert 5 * await bytes_up(federation, *SUMS) < await bytes_up(federation)
    assert found[0] == found[1]
    assert len(set(found[0].values())) == len(STRATEGIES)
