"""Metrics of real runs over real gRPC count each round, member and run once."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families
from support.federation import until
from support.sum_federation import Members, SumFederation, host_of, sum_federation

from potluck.common.monitoring.instruments import Instruments
from potluck.common.monitoring.metric_labels import MeasuredParty, MemberOutcome
from potluck.common.run_file.runfile import parse_run_file
from potluck.server.clock import utc
from potluck.server.store import RunState, Store
from potluck.server.store.records import MemberState, NewRun

pytestmark = pytest.mark.asyncio(loop_scope="module")

CLIENTS = 4
RUN_FILE = f"""
rounds = 2
clients_per_round = 3
expected_clients = {CLIENTS}
task = {{name = "colored-digits", clients = {CLIENTS}}}
training = {{steps = 2}}
"""
SPARING = RUN_FILE + "round.over_selection = 1\n"
PRETRAINING = (
    RUN_FILE
    + """
selector = {name = "feddiverse"}
profiles.triplet = {pretraining_rounds = 1, bias_steps = 1, attribute_steps = 1}
"""
)


class Scene:
    """A federation and the values of its metrics."""

    def __init__(self, federation: SumFederation, instruments: Instruments) -> None:
        self.federation = federation
        self._instruments = instruments

    def counted(self, name: str, label: str = "outcome") -> dict[str, float]:
        """Return the nonzero samples of a series, by a label."""
        return {
            sample.labels[label]: sample.value
            for family in text_string_to_metric_families(self._instruments.exposition().decode())
            for sample in family.samples
            if sample.name == name and sample.value
        }

    def value(self, name: str) -> float:
        """Return the sample of a series without labels."""
        text = self._instruments.exposition().decode()
        [line] = [line for line in text.splitlines() if line.startswith(f"{name} ")]
        return float(line.split()[1])


@pytest_asyncio.fixture(loop_scope="module")
async def scene(members: Members, tmp_path: Path) -> AsyncIterator[Scene]:
    instruments = Instruments(MeasuredParty.COORDINATOR)
    async with sum_federation(members, tmp_path, instruments=instruments) as federation:
        await federation.start()
        yield Scene(federation, instruments)


async def test_a_finished_run_counts_each_round_and_member_once(scene: Scene) -> None:
    row = await scene.federation.finished(SPARING)
    assert row.state is RunState.FINISHED, row.reason
    assert scene.counted("potluck_rounds_total") == {"committed": 2}
    phases = scene.counted("potluck_round_phase_seconds_count", "phase")
    assert phases["commit"] == phases["reduce"] == phases["select"] == 2
    became = scene.counted("potluck_cohort_members_total")
    assert became == {MemberOutcome.SELECTED: 8, MemberOutcome.ANSWERED: 6, MemberOutcome.SPARED: 2}
    history = scene.federation.coordinator.archive.committed_rounds(row.run_id)
    states = [member.state async for entry in history for member in entry.members]
    assert (states.count(MemberState.INCLUDED), states.count(MemberState.SPARED)) == (6, 2)
    assert scene.counted("potluck_runs_ended_total") == {"finished": 1}


async def test_pretraining_is_not_counted_as_a_run(scene: Scene) -> None:
    row = await scene.federation.coordinator.start_run(PRETRAINING)
    under_way = partial(scene.value, "potluck_runs_under_way")
    seen: set[float] = set()

    def over() -> bool:
        seen.add(under_way())
        return scene.federation.coordinator.runs.driver(row.run_id) is None

    await until(over)
    row = await scene.federation.ended(row.run_id)
    assert row.state is RunState.FINISHED, row.reason
    assert seen == {0, 1}
    assert scene.counted("potluck_runs_ended_total") == {"finished": 1}
    assert scene.counted("potluck_rounds_total") == {"committed": 3}
    assert scene.value("potluck_runs_resumed_total") == 0


async def test_run_that_cannot_be_resumed_is_counted_as_failed_at_the_start(
    members: Members, tmp_path: Path
) -> None:
    state = tmp_path / "coordinator"
    state.mkdir()
    run_file = parse_run_file(RUN_FILE, source="test")
    with contextlib.closing(Store.open(f"sqlite:///{state / 'potluck.sqlite3'}")) as store:
        store.add_run(NewRun.of("aa", run_file, "no run file any more", utc(), {}))
    instruments = Instruments(MeasuredParty.COORDINATOR)
    begun = utc().timestamp()
    async with sum_federation(members, tmp_path, instruments=instruments) as federation:
        scene = Scene(federation, instruments)
        assert scene.counted("potluck_runs_ended_total") == {"failed": 1}
        failed = scene.counted("potluck_run_failed_timestamp_seconds", "run")
        assert begun <= failed["aa"] <= utc().timestamp()
        assert scene.value("potluck_member_records_expiry_timestamp_seconds") > begun


async def test_metrics_name_the_disconnected_hosts_of_a_run(scene: Scene) -> None:
    federation = scene.federation
    row = await federation.coordinator.start_run(RUN_FILE.replace("rounds = 2", "rounds = 1000"))
    await until(lambda: scene.counted("potluck_run_committed_rounds", "run").get(row.run_id, 0) > 0)
    missed = partial(scene.counted, "potluck_run_away_host_info", "host")
    assert missed() == {}
    client, agent = next(iter(federation.agents.items()))
    agent.cancel()
    await until(lambda: missed() == {host_of(client): 1})
    await federation.coordinator.stop_run(row.run_id)
    await until(lambda: missed() == {})
    assert scene.counted("potluck_run_failed_timestamp_seconds", "run") == {}
