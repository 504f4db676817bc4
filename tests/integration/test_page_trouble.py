"""The server of the web UI with clients that hold connections open, and with faults in its code."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from types import SimpleNamespace
from typing import Any

import pytest
from support.operator_service import (
    RUN_ID,
    FakeOperatorService,
    committed,
    progress,
    running_operator_service,
    status,
)
from support.pages import PATIENCE_SECONDS, OpenPage, running_page
from support.pki import make_federation

from potluck.deploy.operator.operator_config import OperatorConfig
from potluck.page import overview_watch, page_app, page_command, page_guard, run_shown, run_watch
from potluck.page.coordinator_link import CoordinatorLink
from potluck.page.page_guard import bounded_http
from potluck.page.run_watch import RunWatches
from potluck.rpc.v1.operator_pb2 import RunState


@pytest.fixture
def service() -> FakeOperatorService:
    return FakeOperatorService(  # type: ignore[abstract]  # calls that no test makes
        runs=[status(committed=1).status], holds=True
    )


@pytest.fixture
async def config(
    service: FakeOperatorService, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[OperatorConfig]:
    federation = make_federation(tmp_path_factory.mktemp("pki"))
    async with running_operator_service(service, federation) as config:
        yield config


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit waiting connections to four, each for a moment."""
    monkeypatch.setattr(page_command, "bounded_http", lambda: bounded_http(4, 2.0))


# Connections of others ----------------------------------------------------------------------------


@pytest.mark.usefixtures("impatient")
async def test_idle_connections_do_not_block_a_browser(config: OperatorConfig) -> None:
    async with running_page(config) as opened, asyncio.timeout(PATIENCE_SECONDS):
        page = await opened.opened()
        held = [await asyncio.open_connection("127.0.0.1", page.port) for _ in range(12)]
        for _, writer in held[::2]:
            writer.write(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ")
        assert (await page.get("/")).status == 200
        for reader, writer in held:
            await _until_closed(reader)
            writer.close()


@pytest.mark.usefixtures("impatient")
async def test_connection_without_a_complete_request_is_closed(
    config: OperatorConfig,
) -> None:
    async with running_page(config) as opened, asyncio.timeout(PATIENCE_SECONDS):
        page = await opened.opened()
        reader, writer = await asyncio.open_connection("127.0.0.1", page.port)
        lines = f"GET /static/icon.svg HTTP/1.1\r\nHost: 127.0.0.1\r\nCookie: {page.cookie}\r\n\r\n"
        writer.write(lines.encode())
        assert b"200" in await reader.readline()
        closed = asyncio.create_task(_until_closed(reader))
        while not closed.done():  # send the next request one byte at a time
            writer.write(b"G")
            await asyncio.wait([closed], timeout=0.1)
        await closed
        writer.close()


async def test_refused_request_is_answered_with_403_and_its_connection_is_closed(
    config: OperatorConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = list[object]()
    monkeypatch.setattr(page_guard, "other_user", lambda *ends: looks.append(ends))
    async with running_page(config) as page, asyncio.timeout(PATIENCE_SECONDS):
        for head in (
            "GET /?token=guess HTTP/1.1\r\nHost: 127.0.0.1",
            "GET /api/events HTTP/1.1\r\nHost: 127.0.0.1",
            "POST /api/runs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99999999",
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", page.port)
            writer.write(f"{head}\r\n\r\n".encode())
            assert b"403" in await reader.readline()
            await _until_closed(reader)
            writer.close()
        assert looks == []  # all connections are read only for a request with the token


async def _until_closed(reader: asyncio.StreamReader) -> None:
    """Read to the end."""
    with suppress(ConnectionError):
        await reader.read()


async def test_browser_above_the_limit_of_event_streams_is_refused(
    config: OperatorConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_app, "MOST_STREAMS", 2)
    async with (
        running_page(config) as opened,
        AsyncExitStack() as stack,
        asyncio.timeout(PATIENCE_SECONDS),
    ):
        page = await opened.opened()
        other = OpenPage(page.port, page.access)
        await other.opened()
        leaving = AsyncExitStack()
        for where in (stack, leaving):
            stream = await where.enter_async_context(page.events("/api/events"))
            assert (await anext(stream))[0] == "overview"
        async with page.events("/api/events") as stream:
            assert [event async for event in stream] == [("full", None)]
        async with other.events("/api/events") as stream:  # another browser has its own
            assert (await anext(stream))[0] == "overview"
        await leaving.aclose()
        found = "full"
        while found == "full":  # until the server has noticed that a stream ended
            async with page.events("/api/events") as stream:
                found, _ = await anext(stream)


# Faults of the server -----------------------------------------------------------------------------


async def test_fault_in_the_overview_is_reported_to_every_stream_and_retried(
    config: OperatorConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(overview_watch, "POLL_SECONDS", 0.05)
    right = run_shown.shown_status
    failed, polls = asyncio.Event(), 0

    def wrong(*values: object) -> None:
        nonlocal polls
        polls += 1
        if polls == 3:
            failed.set()
        raise KeyError("rounds")

    async with running_page(config) as opened, asyncio.timeout(PATIENCE_SECONDS):
        page = await opened.opened()
        async with page.events("/api/events") as stream:
            assert (await anext(stream))[1]["connection"]["reached"]
            monkeypatch.setattr(overview_watch, "shown_status", wrong)
            connection = (await anext(stream))[1]["connection"]
            assert (connection["reached"], connection["trouble"]) == (False, "fault")
            assert "the web UI's server failed (KeyError: 'rounds')" in connection["text"]
            await failed.wait()
            monkeypatch.setattr(overview_watch, "shown_status", right)
            overview = (await anext(stream))[1]
            assert overview["connection"]["reached"]
            assert [run["run"] for run in overview["runs"]] == [RUN_ID]
    assert len(caplog.records) == 1  # the same fault is logged once
    assert caplog.records[0].exc_info is not None


async def test_fault_in_watching_a_run_is_reported_and_the_watch_restarts(
    config: OperatorConfig, service: FakeOperatorService, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.watches = [
        [status(committed=1), committed(1, 0.5), progress(2)],
        [status(committed=1), committed(1, 0.5)],
    ]
    right = run_shown.shown_live

    def wrong(*values: object) -> None:
        raise ZeroDivisionError("no members")

    monkeypatch.setattr(run_watch, "shown_live", wrong)
    async with running_page(config) as opened, asyncio.timeout(PATIENCE_SECONDS):
        page = await opened.opened()
        async with page.events(f"/api/events?run={RUN_ID}") as stream:
            gone = await _next(stream, "gone")
            assert gone["trouble"] == "fault"
            assert "the web UI's server failed (ZeroDivisionError: no members)" in gone["error"]
            refused = await page.get(f"/api/runs/{RUN_ID}")  # the run is not followed again at once
            assert (refused.status, refused.json["trouble"]) == (500, "fault")
            assert service.watched == 1
            monkeypatch.setattr(run_watch, "shown_live", right)
            monkeypatch.setattr(run_watch, "time", SimpleNamespace(monotonic=lambda: float("inf")))
            assert (await page.get(f"/api/runs/{RUN_ID}")).status == 200
            assert len((await _next(stream, "run"))["rounds"]) == 1
    assert service.watched == 2


async def _next(stream: AsyncIterator[tuple[str, Any]], wanted: str) -> Any:
    async for kind, data in stream:
        if kind == wanted:
            return data
    raise AssertionError(f"the stream ended without {wanted}")


# Runs that are no longer shown --------------------------------------------------------------------


async def test_server_keeps_the_most_recently_viewed_ended_runs(
    config: OperatorConfig, service: FakeOperatorService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_watch, "MOST_KEPT", 2)
    monkeypatch.setattr(run_watch, "LINGER_SECONDS", -1.0)
    over = status(RunState.RUN_STATE_FINISHED, committed=1)
    service.watches = [[over, committed(1, 0.5), over] for _ in range(4)]
    async with CoordinatorLink(config) as link, asyncio.timeout(PATIENCE_SECONDS):
        watches = RunWatches(link)
        names = ["a", "b", "c", "d"]
        found = {name: watches.of(name) for name in names}
        for name in names:
            await found[name].shown()
            found[name].last_used = time.monotonic()
        await watches.tidy()
        assert [watches.of(name) is found[name] for name in names] == [False, False, True, True]
        await watches.close()
