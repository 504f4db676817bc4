"""The server of the web UI against a scripted coordinator, over mutual TLS: its JSON, its event
streams and its access control."""

from __future__ import annotations

import asyncio
import json
import socket
import urllib.request
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from support.operator_service import (
    RUN_ID,
    FakeOperatorService,
    committed,
    member,
    notice,
    progress,
    running_operator_service,
    status,
)
from support.pages import PATIENCE_SECONDS, OpenPage, running_page
from support.pki import TestFederation, make_federation, tls_files

from potluck.common.disclosure import CLAIM
from potluck.common.net.identity import Role
from potluck.deploy.operator.operator_config import OperatorConfig
from potluck.deploy.pki import authority
from potluck.page import overview_watch, page_guard, run_watch
from potluck.page.page_command import serve_page
from potluck.page.run_draft import FIRST_DRAFT
from potluck.rpc.v1 import operator_pb2
from potluck.rpc.v1.operator_pb2 import MemberState, RunState

FINISHED = RunState.RUN_STATE_FINISHED


@pytest.fixture
def service() -> FakeOperatorService:
    return FakeOperatorService(  # type: ignore[abstract]  # calls that no test makes
        runs=[status(committed=1).status],
        clients=[
            operator_pb2.ClientStatus(
                client_id="client-0", host_id="host-0", attending=True, software_version="0.1.0"
            )
        ],
        profiles=[
            operator_pb2.ClientProfile(client_id=f"client-{number}", label_counts=[number, 1.0])
            for number in range(4)
        ],
        holds=True,
    )


@pytest.fixture
async def config(
    service: FakeOperatorService, federation: TestFederation
) -> AsyncIterator[OperatorConfig]:
    async with running_operator_service(service, federation) as config:
        yield config


@pytest.fixture
async def page(config: OperatorConfig) -> AsyncIterator[OpenPage]:
    async with running_page(config) as page:
        yield await page.opened()


async def _until(
    stream: AsyncIterator[tuple[str, Any]], last: str
) -> AsyncIterator[tuple[str, Any]]:
    """Yield events up to the first one of the kind `last`, which is included."""
    async for kind, data in stream:
        yield kind, data
        if kind == last:
            return


# Walls --------------------------------------------------------------------------------------------


async def test_requests_without_the_token_are_refused(config: OperatorConfig) -> None:
    async with running_page(config) as page:
        paths = ("/", "/api/overview", "/static/main.js", "/?token=guess", "/api/events")
        assert {(await page.get(path)).status for path in paths} == {403}
        token = page.access.token
        await page.opened()
        assert (await page.get("/")).status == 200
        assert (await page.get("/static/main.js")).status == 200
        again = await page.request("GET", f"/?token={token}", cookie="")
        assert again.status == 403
        assert "open the newest address that `potluck page` printed" in again.body


async def test_token_is_refused_for_another_user_of_the_machine(
    config: OperatorConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_page(config) as page:
        with monkeypatch.context() as patched:
            patched.setattr(page_guard, "other_user", lambda *ends: 1001)
            refused = await page.get(f"/?token={page.access.token}")
        assert refused.status == 403
        assert "user is 1001; open the web UI" in refused.body
        await page.opened()  # the token is still valid
        assert (await page.get("/")).status == 200


async def test_request_with_another_host_header_is_refused(page: OpenPage) -> None:
    for path in ("/", "/api/overview", f"/?token={page.access.token}"):
        answer = await page.request("GET", path, headers={"Host": "evil.example:80"})
        assert answer.status == 403
    assert (await page.get("/")).status == 200  # the token is still valid


async def test_post_from_another_origin_is_refused(
    page: OpenPage, service: FakeOperatorService
) -> None:
    good = {"Origin": page.origin, "Content-Type": "application/json"}
    for wrong in (
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": ""},
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Length": "99999999"},
        {"Transfer-Encoding": "chunked"},
    ):
        path = f"/api/runs/{RUN_ID}/stop"
        answer = await page.request("POST", path, body="{}", headers={**good, **wrong})
        assert answer.status == 403, wrong
        assert answer.json["trouble"] == "access"
    assert service.stopped == []
    assert (await page.get(f"/api/runs/{RUN_ID}/stop")).status == 405
    unknown = await page.get("/api/nothing")
    assert (unknown.status, "html" in unknown.headers["content-type"]) == (404, False)


async def test_every_answer_forbids_scripts_of_other_origins(page: OpenPage) -> None:
    for path in ("/", "/static/page.css", "/api/overview", "/nowhere"):
        headers = (await page.get(path)).headers
        assert "script-src 'self'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
        assert "server" not in headers
    for path in ("/static/../page_app.py", "/static/%2e%2e/page_app.py"):
        assert (await page.get(path)).status == 404


async def test_static_files_of_the_web_ui_refer_to_no_other_site(page: OpenPage) -> None:
    static = Path(__file__).parents[2] / "page" / "potluck" / "page" / "static"
    for path in sorted(static.iterdir()):
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text, path.name
        assert "https://" not in text, path.name
        assert (await page.get(f"/static/{path.name}")).body == path.read_text()


# What is shown ------------------------------------------------------------------------------------


async def test_overview_hosts_and_form_are_served_as_json(page: OpenPage) -> None:
    overview = (await page.get("/api/overview")).json
    assert overview["connection"]["reached"]
    assert overview["coordinator"]["version"] == "0.1.0"
    assert [run["run"] for run in overview["runs"]] == [RUN_ID]
    hosts = (await page.get("/api/hosts")).json
    assert hosts["hosts"][0]["clients"][0]["client"] == "client-0"
    form = (await page.get("/api/form")).json
    assert form["draft"]["run_file"] == FIRST_DRAFT
    assert {"rounds", "selector.name"} <= {field["key"] for field in form["fields"]}


async def test_run_is_served_with_its_rounds_cohorts_and_label_mix(
    page: OpenPage, service: FakeOperatorService
) -> None:
    service.watches = [[status(committed=1), committed(1, 0.5), notice("odd"), progress(2)]]
    run = (await page.get(f"/api/runs/{RUN_ID}")).json
    assert run["rounds"][0]["values"]["accuracy"] == 0.5
    assert run["clients"] == ["client-0", "client-1", "client-2"]
    details = (await page.get(f"/api/runs/{RUN_ID}/rounds/1")).json
    assert [each["reason"] for each in details["members"]] == ["uniform"] * 3
    assert (await page.get(f"/api/runs/{RUN_ID}/rounds/9")).status == 404
    disclosed = (await page.get(f"/api/runs/{RUN_ID}/disclosed")).json
    assert disclosed["mix"]["rounds"][0]["selected"] == [0.5, 0.5]
    assert disclosed["privacy"]["largest"] == 1.0
    assert disclosed["privacy"]["claim"] == ""
    assert len(disclosed["roster"]) == 4
    assert service.watched == 1


async def test_disclosures_of_a_masked_run_include_the_secure_aggregation_claim(
    page: OpenPage, service: FakeOperatorService
) -> None:
    service.started = ["secure_aggregation = true"]
    service.watches = [[status(committed=1), committed(1, 0.5)]]
    disclosed = (await page.get(f"/api/runs/{RUN_ID}/disclosed")).json
    assert disclosed["privacy"]["claim"] == f"secure_aggregation: {CLAIM}"


async def test_event_streams_share_one_watch_of_the_coordinator(
    page: OpenPage, service: FakeOperatorService
) -> None:
    service.runs = [status(FINISHED, committed=2).status]
    training = member(7, MemberState.MEMBER_STATE_TRAINING, 0.5)
    service.watches = [
        [status(committed=1), committed(1, 0.5), progress(2, "train", training), notice("odd"),
         committed(2, 0.75, member(7)), status(FINISHED, committed=2)]
    ]  # fmt: skip
    async with AsyncExitStack() as pages:
        streams = [
            await pages.enter_async_context(page.events(f"/api/events?run={RUN_ID}"))
            for _ in range(20)
        ]
        for stream in streams:
            rounds, overview = 0, False
            async for kind, data in stream:
                overview |= kind == "overview"
                rounds = len(data["rounds"]) if kind == "run" else rounds + (kind == "round")
                if rounds == 2 and overview:
                    break
    assert service.watched == 1


async def test_later_event_stream_receives_the_earlier_rounds(
    page: OpenPage, service: FakeOperatorService
) -> None:
    service.watches = [[status(committed=1), committed(1, 0.5), progress(2, "train", member(1))]]
    await page.get(f"/api/runs/{RUN_ID}")
    async with page.events(f"/api/events?run={RUN_ID}") as stream:
        async for kind, data in stream:
            if kind == "run":
                assert len(data["rounds"]) == 1
                break


async def test_server_keeps_the_newest_rounds_of_a_long_run(
    page: OpenPage, service: FakeOperatorService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_watch, "MOST_ROUNDS", 2)
    rounds = [committed(number, 0.5) for number in (1, 2, 3)]
    service.watches = [[status(committed=3), *rounds, progress(4)]]
    run = (await page.get(f"/api/runs/{RUN_ID}")).json
    assert ([each["round"] for each in run["rounds"]], run["earlier"]) == ([2, 3], 1)
    assert (await page.get(f"/api/runs/{RUN_ID}/rounds/1")).status == 404
    assert (await page.get(f"/api/runs/{RUN_ID}/rounds/3")).status == 200


async def test_server_stops_watching_a_run_after_its_last_stream_closes(
    config: OperatorConfig, service: FakeOperatorService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overview_watch, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(run_watch, "LINGER_SECONDS", 0.1)
    service.watches = [[status(committed=1), committed(1, 0.5)]]
    async with running_page(config) as opened, asyncio.timeout(PATIENCE_SECONDS):
        page = await opened.opened()
        async with page.events(f"/api/events?run={RUN_ID}") as stream:
            assert [kind async for kind, _ in _until(stream, "run")]
        assert not service.unwatched.is_set()
        await service.unwatched.wait()


async def test_event_stream_of_an_unknown_run_reports_the_reason(
    page: OpenPage, service: FakeOperatorService
) -> None:
    service.missing = "zzz"
    async with page.events("/api/events?run=zzz") as stream:
        found = [data async for kind, data in _until(stream, "gone") if kind == "gone"]
    assert found == [{"error": "no run begins with 'zzz'", "trouble": "missing"}]


# Changes ------------------------------------------------------------------------------------------


async def test_runs_are_started_stopped_and_resumed_over_http(
    page: OpenPage, service: FakeOperatorService
) -> None:
    service.watches = [[status()], [status()]]
    started = await page.post("/api/runs", {"run_file": FIRST_DRAFT})
    assert (started.status, started.json) == (200, {"run": RUN_ID})
    assert service.started == [FIRST_DRAFT]
    again = (await page.get(f"/api/form?again={RUN_ID}")).json
    assert again["draft"]["run_file"] == FIRST_DRAFT
    assert (await page.post(f"/api/runs/{RUN_ID}/stop", {})).status == 200
    assert (await page.post(f"/api/runs/{RUN_ID}/resume", {})).status == 200
    assert (service.stopped, service.resumed) == ([RUN_ID], [RUN_ID])
    missing = await page.post("/api/runs/zzz/stop", {})
    assert (missing.status, missing.json["trouble"]) == (404, "missing")
    assert missing.json["error"] == "no run begins with 'zzz'"
    conflict = await page.post("/api/runs/zzz/resume", {})
    assert (conflict.status, conflict.json["error"]) == (409, "run zzz is finished")


async def test_problems_of_a_run_file_are_reported_per_field(page: OpenPage) -> None:
    wrong = FIRST_DRAFT.replace("clients_per_round = 9", "clients_per_round = 0")
    refused = await page.post("/api/runs", {"run_file": wrong})
    assert refused.status == 400
    [problem] = refused.json["problems"]
    assert (problem["key"], problem["line"]) == ("clients_per_round", 3)
    unknown = FIRST_DRAFT.replace('"uniform"', '"powr"')
    [problem] = (await page.post("/api/runs", {"run_file": unknown})).json["problems"]
    assert problem["text"] == "'powr' is not installed"
    draft = (
        await page.post("/api/draft", {"run_file": wrong, "changes": {"clients_per_round": "3"}})
    ).json
    assert (draft["problems"], draft["values"]["clients_per_round"]) == ([], "3")
    headers = {"Origin": page.origin, "Content-Type": "application/json"}
    garbage = await page.request("POST", "/api/draft", body="{", headers=headers)
    assert (garbage.status, garbage.json["trouble"]) == (400, "refused")


async def test_compare_lists_the_rounds_and_differences_of_runs(
    page: OpenPage, service: FakeOperatorService
) -> None:
    service.started = [FIRST_DRAFT]
    over = status(FINISHED, committed=2)
    service.watches = [[over, committed(1, 0.5), committed(2, 0.5), over] for _ in range(2)]
    found = (await page.get("/api/compare?run=a&run=b")).json
    assert [len(run["rounds"]) for run in found["runs"]] == [2, 2]
    assert found["differences"] == []
    alone = await page.get("/api/compare?run=a")
    assert (alone.status, alone.json["error"]) == (400, "select from 2 to 6 runs to compare")


# Trouble ------------------------------------------------------------------------------------------


async def test_lost_coordinator_is_reported_and_reconnected(
    service: FakeOperatorService, federation: TestFederation
) -> None:
    async with AsyncExitStack() as stack:
        coordinator = AsyncExitStack()
        config = await coordinator.enter_async_context(
            running_operator_service(service, federation)
        )
        page = await (await stack.enter_async_context(running_page(config))).opened()
        assert (await page.get("/api/overview")).json["connection"]["reached"]
        await coordinator.aclose()
        overview = (await page.get("/api/overview")).json
        assert overview["connection"]["trouble"] == "lost"
        assert f"at {config.coordinator}" in overview["connection"]["text"]
        assert [run["run"] for run in overview["runs"]] == [RUN_ID]  # from the earlier answer
        stopped = await page.post(f"/api/runs/{RUN_ID}/stop", {})
        assert (stopped.status, stopped.json["trouble"]) == (502, "lost")


async def test_expired_certificate_is_reported_and_a_renewed_one_is_used(
    service: FakeOperatorService, federation: TestFederation, tmp_path: Path
) -> None:
    long_ago = datetime.now(UTC) - timedelta(days=30)
    async with running_operator_service(service, federation) as config:
        mine = {name: tmp_path / name for name in ("certificate", "key")}
        tls = config.tls.model_copy(update=mine)
        good = {name: getattr(config.tls, name).read_bytes() for name in mine}
        old = tls_files(
            authority.issue(federation.folder, Role.OPERATOR, "old", days=1, now=long_ago)
        )
        for name, path in mine.items():
            path.write_bytes(getattr(old, name).read_bytes())
        async with running_page(config.model_copy(update={"tls": tls})) as opened:
            page = await opened.opened()
            connection = (await page.get("/api/overview")).json["connection"]
            assert connection["trouble"] == "certificate"
            assert f"{mine['certificate']} expired on " in connection["text"]
            assert "renew it with `potluck pki renew " in connection["text"]
            run = await page.get(f"/api/runs/{RUN_ID}")
            assert (run.status, run.json["trouble"]) == (502, "certificate")
            for name, path in mine.items():
                path.write_bytes(good[name])
            assert (await page.get("/api/overview")).json["connection"]["reached"]


async def test_renewed_authority_file_is_used(
    service: FakeOperatorService, federation: TestFederation, tmp_path: Path
) -> None:
    """The operator's own certificate stays the same."""
    renewed = make_federation(tmp_path / "renewed")
    old = federation.operator.authority.read_bytes()
    both = tmp_path / "both.pem"
    both.write_bytes(old + renewed.operator.authority.read_bytes())
    mine = tmp_path / "mine.pem"
    mine.write_bytes(old)
    coordinator = renewed.coordinator.model_copy(update={"authority": both})
    async with AsyncExitStack() as stack:
        config = await stack.enter_async_context(
            running_operator_service(service, replace(federation, coordinator=coordinator))
        )
        tls = config.tls.model_copy(update={"authority": mine})
        config = config.model_copy(update={"tls": tls})
        page = await (await stack.enter_async_context(running_page(config))).opened()
        assert not (await page.get("/api/overview")).json["connection"]["reached"]
        mine.write_bytes(both.read_bytes())
        await page.get("/api/overview")  # this call fails, so the file is read again
        assert (await page.get("/api/overview")).json["connection"]["reached"]


async def test_browser_opens_only_once_the_server_answers(
    config: OperatorConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    answered = loop.create_future()

    def browse(address: str) -> None:
        with urllib.request.urlopen(address, timeout=PATIENCE_SECONDS) as answer:  # noqa: S310  # the page's
            loop.call_soon_threadsafe(answered.set_result, answer.status)

    monkeypatch.setattr("webbrowser.open", browse)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        serving = asyncio.create_task(serve_page(config, listening, browser=True))
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert await answered == 200
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving


async def test_server_closes_while_event_streams_are_open(config: OperatorConfig) -> None:
    async with AsyncExitStack() as stack, asyncio.timeout(PATIENCE_SECONDS):
        async with running_page(config) as opened:
            page = await opened.opened()
            stream = await stack.enter_async_context(page.events("/api/events"))
            kind, data = await anext(stream)
            assert kind == "overview"
            assert json.dumps(data)
        assert [event async for event in stream if event[0] != "overview"] == []
