"""However many calls are refused, the log stays short and loses no count."""

from __future__ import annotations

import asyncio
from typing import Any

from structlog.testing import capture_logs

from potluck.common.errors import (
    NotFoundError,
    ProtocolError,
    RelayStorageError,
    StorageError,
    UnreachableError,
)
from potluck.server.service.guard import RefusalLog


async def told(lines: list[Any], count: int) -> None:
    async with asyncio.timeout(60):
        while len(lines) < count:  # noqa: ASYNC110  # a timer of the loop writes them
            await asyncio.sleep(0)


async def test_first_refusal_is_logged_at_once_and_later_ones_as_a_count() -> None:
    refusals = RefusalLog(interval_seconds=0.02)
    with capture_logs() as lines:
        for _ in range(1000):
            refusals.refused("host a", "/Attend", ProtocolError("no message"))
        refusals.refused("host a", "/Attend", NotFoundError("no run"))
        refusals.refused("host b", "/Attend", ProtocolError("no message"))
        assert [(one["peer"], one["reason"]) for one in lines] == [
            ("host a", "PROTOCOL_VIOLATED"),
            ("host a", "NOT_FOUND"),
            ("host b", "PROTOCOL_VIOLATED"),
        ]
        await told(lines, 4)
        assert lines[3] == {
            "event": "more calls refused",
            "log_level": "info",
            "peer": "host a",
            "reason": "PROTOCOL_VIOLATED",
            "count": 999,
        }


async def test_full_disk_is_logged_as_a_warning_after_another_refusal() -> None:
    refusals = RefusalLog(interval_seconds=60)
    with capture_logs() as lines:
        for error in (UnreachableError("gone"), RelayStorageError("full"), StorageError("full")):
            refusals.refused("host a", "/FetchModel", error)
    assert [(one["log_level"], one["reason"]) for one in lines] == [
        ("info", "UNREACHABLE"),
        ("warning", "RELAY_STORAGE_FAILED"),
        ("warning", "STORAGE_FAILED"),
    ]


async def test_internal_error_is_logged_once_with_its_traceback() -> None:
    refusals = RefusalLog(interval_seconds=60)
    with capture_logs() as lines:
        for _ in range(3):
            try:
                raise KeyError("x")
            except KeyError as error:
                refusals.failed("host a", "/Attend", error)
    [line] = lines
    assert isinstance(line["exc_info"], KeyError)
    assert line["log_level"] == "error"
