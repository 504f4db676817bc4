"""Profiles over the wire: real processes disclose once, within their own policy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.federation import Federation
from support.profile_federation import ledgers, profile_federation

from potluck.deploy.profile_commands import profiles_text
from potluck.deploy.profile_file import read_profile_file
from potluck.rpc.v1 import operator_pb2


@pytest.mark.parametrize(
    ("task", "selector", "signal"),
    [
        ("digits", "fedentopt", "label_counts"),
        ("digits", "dc-balanced", "label_counts"),
        ("colored-digits", "feddiverse", "triplet"),
    ],
)
async def test_selectors_get_the_profiles_they_need(
    tmp_path: Path, task: str, selector: str, signal: str
) -> None:
    async with profile_federation(tmp_path, task=task, selector=selector) as federation:
        run_id = await federation.start_run()
        await federation.finished(run_id)
        kept = ledgers(federation)
        classes, clients = await federation.operator.fetch_profiles(run_id)
        runs = await federation.operator.list_runs()
    assert len(runs) == 1
    assert sorted(kept) == [f"client-{n}" for n in range(4)]
    for client, ledger in kept.items():
        [release] = ledger["releases"]
        assert release["signal"] == signal
        assert release["epsilon"] == 1.0
        [recipient] = release["recipients"]
        assert recipient["run"] == run_id
        sent = json.loads(release["payload_json"])[signal]
        [shown] = [each for each in clients if each.client_id == client]
        assert list(getattr(shown, signal)) == sent
    path = tmp_path / "profiles.json"
    path.write_text(profiles_text(classes, clients))
    population = read_profile_file(path)
    assert list(population.ids) == sorted(kept)
