"""The coordinator's sink processes: one that records, one that dies and one that hangs."""

from __future__ import annotations

import asyncio
from pathlib import Path

from structlog.testing import capture_logs
from support.federation import plugins_installed
from support.stored import AT, begun_run, committed

from potluck.common.monitoring.instruments import Instruments
from potluck.common.monitoring.metric_labels import MeasuredParty
from potluck.server.sinks.sink_job import sink_jobs
from potluck.server.sinks.sink_watch import Sinks
from potluck.server.store import AttemptKey, Store
from potluck.server.store.records import RunState


async def test_logs_and_metrics_show_the_state_of_each_sink(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'potluck.sqlite3'}"
    instruments = Instruments(MeasuredParty.COORDINATOR)

    def shown() -> str:
        return instruments.exposition().decode()

    with (
        Store.open(url) as store,
        plugins_installed(tmp_path / "points", "none") as points,
        capture_logs() as logs,
    ):
        begun_run(store)
        committed(store, AttemptKey("ab12", 1, 1))
        points.hold("sink-hang")
        tables = {"csv": {}, "dying": {}, "hanging": {"silence_timeout_seconds": 3}}
        jobs = sink_jobs(tables, database=url, state_directory=tmp_path)
        sinks = Sinks(jobs, instruments)
        assert 'potluck_sink_up{sink="csv"} 0.0' in shown()
        sinks.begin()
        async with asyncio.timeout(240):
            while 'potluck_sink_up{sink="csv"} 1.0' not in shown():  # noqa: ASYNC110  # of another process
                await asyncio.sleep(0.05)
            while not {"dying", "hanging"} <= {each.get("sink") for each in logs}:  # noqa: ASYNC110  # likewise
                await asyncio.sleep(0.05)
        committed(store, AttemptKey("ab12", 2, 1))
        store.set_run_state("ab12", RunState.FINISHED, "", AT)
        sinks.tell()
        await sinks.close()
    assert (tmp_path / "sinks" / "csv" / "ab12.csv").read_text().count("\n") == 3
    assert 'potluck_sink_behind_rounds{sink="csv"} 0.0' in shown()
    assert 'potluck_sink_up{sink="dying"} 0.0' in shown()
    reasons = {str(each["sink"]): str(each["reason"]) for each in logs if "reason" in each}
    assert "killed by signal 9" in reasons["dying"]
    assert "was silent for 3 s during its work" in reasons["hanging"]
