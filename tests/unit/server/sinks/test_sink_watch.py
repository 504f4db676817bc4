"""Sink processes that can't start or write invalid reports are logged and restarted."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from potluck.common.monitoring.instruments import Instruments
from potluck.common.monitoring.metric_labels import MeasuredParty
from potluck.server.sinks.sink_job import sink_jobs
from potluck.server.sinks.sink_process import SinkReport
from potluck.server.sinks.sink_watch import SinkProcess


async def first_reason(state_directory: Path) -> str:
    """Start a sink; return the first logged reason for starting it again."""
    [job] = sink_jobs({"csv": {}}, database="sqlite:///x", state_directory=state_directory)
    sink = SinkProcess(job, Instruments(MeasuredParty.COORDINATOR))
    with capture_logs() as logs:
        running = asyncio.create_task(sink.run())
        async with asyncio.timeout(60):
            while not logs and not running.done():  # noqa: ASYNC110  # of another process
                await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait([running])
    return str(logs[0]["reason"])


async def test_sink_process_that_writes_a_too_long_line_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talking = tmp_path / "talking"
    talking.write_text("#!/bin/sh\nhead -c 200000 /dev/zero | tr '\\0' x\nexec cat\n")
    talking.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(talking))
    reason = await first_reason(tmp_path)
    assert reason == "the sink's process wrote an invalid report, and was killed"


async def test_sink_report_changes_only_the_values_it_contains(tmp_path: Path) -> None:
    [job] = sink_jobs({"csv": {}}, database="sqlite:///x", state_directory=tmp_path)
    instruments = Instruments(MeasuredParty.COORDINATOR)
    sink = SinkProcess(job, instruments)
    with capture_logs() as logs:
        for line in (
            {"behind": 3},
            {"trouble": "the database is away"},
            {"behind": 2, "unreadable": "run ab12: odd"},
            {"behind": 2, "unreadable": "run ab12: odd"},
            {"behind": 2, "ahead": "run ab12: rounds 3 to 4"},
            {"behind": 2, "ahead": "run ab12: rounds 3 to 4"},
        ):
            sink._take(SinkReport.model_validate({"ended": True, **line}))
            shown = instruments.exposition().decode()
            behind = line.get("behind", 3)
            assert f'potluck_sink_behind_rounds{{sink="csv"}} {behind}.0' in shown
            assert f'potluck_sink_up{{sink="csv"}} {float("trouble" not in line)}' in shown
    assert [(each["log_level"], each.get("reason", each.get("rounds"))) for each in logs] == [
        ("warning", "the database is away"),
        ("info", None),
        ("error", "run ab12: odd"),
        ("warning", "run ab12: rounds 3 to 4"),
    ]


async def test_sink_folder_that_can_not_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "sinks").write_text("")
    reason = await first_reason(tmp_path)
    assert reason == f"the sink's process can't be started: {tmp_path}/sinks/csv: Not a directory"
