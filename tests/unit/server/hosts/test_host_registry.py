"""A host that reconnects in a loop does not fill the coordinator's log."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from structlog.testing import capture_logs

from potluck.common.monitoring.instruments import Instruments
from potluck.common.monitoring.metric_labels import MeasuredParty
from potluck.server.hosts.attendance import Attendance, HostSession
from potluck.server.hosts.host_registry import HostRegistry
from potluck.server.hosts.line_limit import limit_of_hosts


async def in_store(call: Any) -> Any:
    """Store nothing."""


def session(host: str) -> HostSession:
    return HostSession(host_id=host, client_ids=(host,), device="cpu", tasks=frozenset())


async def test_lines_about_a_host_that_reconnects_in_a_loop_are_limited() -> None:
    attendance = Attendance(lambda: 0.0)
    attendance.lines = limit_of_hosts(interval_seconds=0.5)
    registry = HostRegistry(
        attendance, Instruments(MeasuredParty.COORDINATOR), in_store, heartbeat_seconds=2.0
    )
    omitted = Counter[str]()
    with capture_logs() as lines:
        for host, times in (("loop", 200), ("other", 3)):
            for _ in range(times):
                async with registry.attending(session(host)):
                    pass
        async with asyncio.timeout(60):
            while omitted.total() < 2 * 190:  # a timer of the loop logs the counts
                await asyncio.sleep(0)
                counts = [line for line in lines if line["event"] == "more lines about a host"]
                omitted = Counter[str]()
                for line in counts:
                    omitted[line["line"]] += line["count"]
    logged = Counter((line["event"], line["host"]) for line in lines if "count" not in line)
    assert logged == {
        ("host attends", "loop"): 10,
        ("host left", "loop"): 10,
        ("host attends", "other"): 3,
        ("host left", "other"): 3,
    }
    assert omitted == {"host attends": 190, "host left": 190}
    assert {line["host"] for line in counts} == {"loop"}
