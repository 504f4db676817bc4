"""Texts that hosts send contain no control sequences in the database, in the log or in the output
of the operator's commands."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import sys
from collections.abc import AsyncIterator
from contextlib import closing
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.federation import Federation, crash_federation
from support.raw_host import RawHost, header, trailer, training_of

from potluck.common.net.protocol import PROTOCOL_VERSION, VERSIONS
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1 import transfer_pb2

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

ME = "client-2"
TITLE = "\x1b]0;title\x07\x1b[2J\x9b2J"
FORGED = "\x1b[1A\rround 7 committed\r\n2026-01-01T00:00:00Z [info] round committed\u2028"
TURNED = "\u202egpj.exe\u2066\u200f\x7f\x00"
MARKUP = "[bold red]x[/] [/nothing] [link=file:///etc/passwd]y[/link] :smile:"

SAID = st.text(max_size=100) | st.sampled_from([TITLE, FORGED, TURNED, MARKUP, "x" * 100_000])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def federation(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Federation]:
    """Run two honest hosts; the tests use the certificate of a third one."""
    async with crash_federation(
        tmp_path_factory.mktemp("texts"),
        clients=3,
        hosts=3,
        count=3,
        rounds=1,
        coordinator={"log_level": "debug"},
        start_hosts=False,
    ) as federation:
        for number in (0, 1):
            await federation.processes.start_host(number)
        await federation.until_attending(2)
        yield federation


@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(reason=SAID, message=SAID, device=SAID, name=SAID)
@example(reason=FORGED, message=TITLE, device=TITLE, name=TURNED)
@example(reason=MARKUP, message=MARKUP, device=MARKUP, name=MARKUP)
@example(reason="x" * 100_000, message=FORGED * 1000, device=TURNED, name=TITLE)
async def test_hostile_texts_of_hosts_are_stored_and_logged_as_plain_text(
    federation: Federation, reason: str, message: str, device: str, name: str
) -> None:
    async with RawHost.of(federation.files.hosts[2]) as host:
        run_id = await says(federation, host, reason, message, device, name)
    assert_plain_in_store(federation)
    assert_plain_in_log(federation)
    trouble = [
        member.trouble
        for entry in await federation.history(run_id)
        for member in entry.members
        if member.client_id == ME
    ]
    assert len(trouble) == 1
    assert trouble[0].isprintable()
    assert len(trouble[0]) <= 600


async def says(
    federation: Federation, host: RawHost, reason: str, message: str, device: str, name: str
) -> str:
    """Send these texts in every field that a host controls; return the id of the run."""
    hello = rpc.Hello(
        protocol_version=PROTOCOL_VERSION,
        software_version=name,
        client_ids=[ME],
        device=device,
        tasks=[name, device, "crash"],
        versions=VERSIONS,
        process_id=name,
    )
    call: Any = host.stub.Attend()
    await call.write(rpc.AttendRequest(hello=hello))
    assert isinstance(await call.read(), rpc.AttendResponse)
    run_id = await federation.start_run("round.quorum=0.3")
    told = await training_of(call, ME, run_id)
    progress = rpc.Progress(instruction_id=name, fraction=0.5)
    failure = rpc.Failure(reason=reason, message=message)
    content = b"no update"
    report, measures = transfer_pb2.TrainingReport(samples=32), rpc.MeasuredSums()
    for each in (report.measures, measures.sums):
        each[name].sum = 1.0
    first = header(name, ME, content, report=report)
    assert isinstance(await host.submit([first, trailer(content)]), tuple)
    assert isinstance(await host.submit([header(told.id, name, content)]), tuple)
    for said in (
        rpc.AttendRequest(heartbeat=rpc.Heartbeat(progress=[progress])),
        rpc.AttendRequest(acknowledgement=rpc.Acknowledgement(instruction_id=name)),
        rpc.AttendRequest(answer=rpc.Answer(instruction_id=name, measures=measures)),
        rpc.AttendRequest(answer=rpc.Answer(instruction_id=told.id, failure=failure)),
    ):
        await call.write(said)
    await federation.finished(run_id)
    call.cancel()
    return run_id


def assert_plain_in_store(federation: Federation) -> None:
    path = federation.state / "potluck.sqlite3"
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        for (table,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'"):
            rows = database.execute(f'SELECT * FROM "{table}"')  # noqa: S608  # its own names
            columns = [column[0] for column in rows.description]
            for row in rows:
                for column, value in zip(columns, row, strict=True):
                    if isinstance(value, str) and column != "run_file":
                        assert value.isprintable(), (table, column, value)
                        assert len(value) < 20_000, (table, column)


def assert_plain_in_log(federation: Federation) -> None:
    lines = federation.files.log("coordinator").read_text(encoding="utf-8").split("\n")
    assert all(line.isprintable() for line in lines)
    assert not any('"event": "call failed"' in line for line in lines)
    assert all(line.startswith("{") or not line for line in lines)  # no forged lines


@pytest.mark.parametrize("command", [["runs"], ["clients"], ["watch"]], ids=lambda one: one[0])
async def test_commands_print_hostile_texts_as_plain_text(
    federation: Federation, command: list[str]
) -> None:
    async with RawHost.of(federation.files.hosts[2]) as host:
        run_id = await says(federation, host, FORGED, f"{TITLE} {MARKUP}", f"{TITLE}{MARKUP}", "x")
    operator = federation.files.operator
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "potluck.deploy",
        *command,
        *([run_id] if command == ["watch"] else []),
        env=os.environ
        | {
            "POTLUCK_COORDINATOR": operator.coordinator,
            "POTLUCK_CERTIFICATE": str(operator.tls.certificate),
            "POTLUCK_KEY": str(operator.tls.key),
            "POTLUCK_AUTHORITY": str(operator.tls.authority),
        },
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    shown, _ = await process.communicate()
    lines = shown.decode().split("\n")
    assert process.returncode == 0, shown
    assert all(line.isprintable() for line in lines)
    assert not any(line.startswith("round 7") for line in lines)
    if command == ["clients"]:
        assert r"\x1b]0;title\x07" in shown.decode()
        assert "[bold red]x[/] [/nothing]" in shown.decode()
