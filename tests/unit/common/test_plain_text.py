"""Text from other parties can't control a terminal or hide a line."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, timedelta, timezone
from pathlib import Path

import pytest
import structlog
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import example, given
from hypothesis import strategies as st
from rich.table import Table
from support.pki import make_federation
from support.repository import ROOT

from potluck.common.errors import ConfigurationError, PotluckError, to_status
from potluck.common.plain_text import MOST_CHARACTERS, make_plain, plain, without_passwords
from potluck.common.process.logs import LogFormat, configure_logging
from potluck.deploy.terminal import terminal
from potluck.rpc.v1 import (
    coordinator_pb2,
    operator_pb2,
    secure_aggregation_pb2,
    transfer_pb2,
)

ANY = st.text(st.characters(codec=None), max_size=60)  # includes lone surrogates
SENT = st.text(max_size=60)  # all texts that protobuf can hold
PLAIN_ASCII = st.from_regex(r"[!-~]( ?[!-~]){0,30}", fullmatch=True)


@given(ANY)
@example("\x1b]0;title\x07\x1b[2Jround 3 committed\r\nround 4 committed")
@example("\x9b2J\u202egpj.exe\u2066\ud800\u2028 \x7f")
def test_any_text_becomes_one_printable_line(text: str) -> None:
    found = plain(text)
    assert found.isprintable()
    assert plain(found) == found
    found.encode()  # fails for lone surrogates


@given(PLAIN_ASCII | st.sampled_from(["Größe: 3 µm", "模型", "déjà vu …"]))
def test_plain_text_is_unchanged(text: str) -> None:
    assert plain(text) == text


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("two\nlines\t and\r\nmore ", "two lines and more"),
        ("\x1b[31mred", r"\x1b[31mred"),
        ("\u202egpj.exe", r"\u202egpj.exe"),
        ("\ud800", r"\ud800"),
        ("a\x85b\u2028c", "a b c"),
        ("\U000e0041", r"\U000e0041"),
    ],
)
def test_unprintable_characters_are_replaced(text: str, found: str) -> None:
    assert plain(text) == found


@given(ANY, st.integers(2, 40))
def test_plain_text_has_a_maximum_length(text: str, most: int) -> None:
    found = plain(text, most)
    assert len(found) <= most
    assert plain(found, most) == found
    assert len(plain("x" * 10_000_000)) == MOST_CHARACTERS


@given(SENT, SENT, st.lists(SENT, max_size=3), st.dictionaries(SENT, st.floats(), max_size=3))
def test_every_string_of_a_message_is_made_printable(
    one: str, other: str, several: list[str], numbers: dict[str, float]
) -> None:
    answers = [
        coordinator_pb2.AttendRequest(
            answer=coordinator_pb2.Answer(
                instruction_id=one, failure=coordinator_pb2.Failure(reason=other, message=one)
            )
        ),
        coordinator_pb2.AttendRequest(
            answer=coordinator_pb2.Answer(scalars=coordinator_pb2.Scalars(values=numbers))
        ),
        coordinator_pb2.AttendRequest(
            hello=coordinator_pb2.Hello(client_ids=several, device=one, tasks=several)
        ),
        coordinator_pb2.SubmitUpdateRequest(
            frame=transfer_pb2.UpdateFrame(
                header=transfer_pb2.UpdateHeader(
                    update_id=one, report=transfer_pb2.TrainingReport(reports=numbers)
                )
            )
        ),
        operator_pb2.ListRunsResponse(runs=[operator_pb2.RunStatus(name=one, reason=other)]),
    ]
    for message in answers:
        make_plain(message)
        assert all(text.isprintable() for text in texts_of(message))


def filled(kind: Descriptor, text: str, depth: int = 6) -> Iterator[Message]:
    """Yield messages of a type. Each has one of its fields set, and `text` in all texts below."""
    for field in kind.fields:
        message = message_factory.GetMessageClass(kind)()
        put = getattr(message, field.name)
        inner = field.message_type
        if inner is not None and inner.GetOptions().map_entry:
            key, value = inner.fields
            name = text if key.type == key.TYPE_STRING else 1
            if value.message_type is None:
                put[name] = text if value.type == value.TYPE_STRING else 1
            else:
                for each in filled(value.message_type, text, depth - 1):
                    put[name].MergeFrom(each)
        elif inner is not None:
            for each in filled(inner, text, depth - 1) if depth else ():
                put.add().CopyFrom(each) if field.is_repeated else put.MergeFrom(each)
        elif field.type == field.TYPE_STRING:
            put.append(text) if field.is_repeated else setattr(message, field.name, text)
        yield message


@pytest.mark.parametrize("text", ["two\nlines", "\x1b[2J", "\u202egpj.exe", "x" * 2_001])
def test_texts_of_every_type_of_message_are_made_plain(text: str) -> None:
    files = (coordinator_pb2, operator_pb2, secure_aggregation_pb2, transfer_pb2)
    kinds = [kind for each in files for kind in each.DESCRIPTOR.message_types_by_name.values()]
    messages = [message for kind in kinds for message in filled(kind, text)]
    assert sum(text in texts_of(message) for message in messages) > 100
    for message in messages:
        make_plain(message)
        assert text not in texts_of(message), message


def test_map_of_messages_keeps_its_values_under_plain_keys() -> None:
    report = transfer_pb2.TrainingReport(samples=3)
    report.measures["lo\nss"].sum = 1.5
    report.measures["x"].sum = 2.5
    make_plain(report)
    assert {key: value.sum for key, value in report.measures.items()} == {"lo ss": 1.5, "x": 2.5}


@given(st.integers(-(2**63), 2**63 - 1), st.integers(-(2**31), 2**31 - 1))
@example(-1, 0)
@example(253_402_214_400, 0)
@example(0, 10**9)
def test_any_time_in_a_message_becomes_one_that_every_time_zone_has(
    seconds: int, nanos: int
) -> None:
    given_time = Timestamp(seconds=seconds, nanos=nanos)
    run = operator_pb2.RunStatus(created_at=given_time)
    make_plain(run)
    found = run.created_at.ToDatetime(tzinfo=UTC)
    for hours in (-14, 14):
        assert found.astimezone(timezone(timedelta(hours=hours))) == found
    if 0 <= seconds < 253_402_214_400 and 0 <= nanos < 10**9:
        assert run.created_at == given_time


def texts_of(value: object) -> list[str]:
    """Return all texts of a message except documents, read from its JSON form."""
    if isinstance(value, Message):
        return texts_of(MessageToDict(value, preserving_proto_field_name=True))
    if isinstance(value, dict):
        pairs = [pair for pair in value.items() if not pair[0].endswith(("_json", "run_file"))]
        return [text for pair in pairs for each in pair for text in texts_of(each)]
    if isinstance(value, list):
        return [text for each in value for text in texts_of(each)]
    return [value] if isinstance(value, str) else []


def test_run_file_in_a_message_keeps_its_line_breaks() -> None:
    run = operator_pb2.StartRunRequest(run_file="a = 1\n[b]\n")
    make_plain(run)
    assert run.run_file == "a = 1\n[b]\n"


@given(ANY)
def test_error_message_is_one_printable_line(text: str) -> None:
    error = ConfigurationError(f"bad {text}", value=text)
    assert error.message.isprintable()
    assert str(error) == error.message
    assert all(value.isprintable() for value in error.metadata.values())
    assert to_status(error).SerializeToString()


@contextlib.contextmanager
def logged(kind: LogFormat) -> Iterator[io.StringIO]:
    """Capture the log lines written within the context."""
    with contextlib.redirect_stderr(io.StringIO()) as lines:
        configure_logging(kind)
        try:
            yield lines
        finally:
            structlog.reset_defaults()


@pytest.mark.parametrize("kind", [LogFormat.JSON, LogFormat.CONSOLE])
@given(text=ANY)
@example("\x1b[2J\nround committed")
def test_log_lines_are_printable(kind: LogFormat, text: str) -> None:
    with logged(kind) as lines:
        log = structlog.get_logger()
        log.info(f"said {text}", text=text, several=[text], named={text: text})
        try:
            raise PotluckError(text) from ValueError(text)
        except PotluckError:
            log.exception("failed")
    shown = lines.getvalue()
    assert all(line.isprintable() for line in shown.split("\n"))
    assert shown.splitlines()[1:2] != ["round committed"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("postgresql://lab:s3cret@db/potluck", "postgresql://lab:***@db/potluck"),
        (
            "can't reach postgresql://lab:s3:c@r/et@db:1/x now",
            "can't reach postgresql://lab:***@db:1/x now",
        ),
        (
            "postgresql://db/x?user=lab&password=s3cret&a=1",
            "postgresql://db/x?user=lab&password=***&a=1",
        ),
        ("sqlite:////var/x", "sqlite:////var/x"),
        ("ssh://ada@lab:22/x", "ssh://ada@lab:22/x"),
        ("potluck://demo/host/a?clients=b", "potluck://demo/host/a?clients=b"),
    ],
)
def test_passwords_are_removed_from_texts_and_errors(text: str, found: str) -> None:
    assert without_passwords(text) == found
    assert ConfigurationError(text).message == found


@given(ANY)
@example("[red]x[/]")
@example("[/nothing]")
@example(":smile: [link=http://x]y[/link]")
def test_printed_text_is_not_interpreted_as_markup(text: str) -> None:
    text = plain(text)
    output = terminal(width=4000, soft_wrap=True)
    table = Table("[bold]head", box=None, pad_edge=False)
    table.add_row(text)
    with output.capture() as shown:
        output.print(text, highlight=False)
        output.print(table)
    assert shown.get().startswith(text.rstrip())
    assert "[bold]head" in shown.get()


def test_every_command_prints_through_the_terminal_without_markup() -> None:
    folder = ROOT / "deploy" / "potluck" / "deploy"
    makers = [path.name for path in folder.rglob("*.py") if "Console(" in path.read_text()]
    assert makers == ["terminal.py"]


def test_coordinator_log_does_not_contain_the_database_password(tmp_path: Path) -> None:
    files = make_federation(tmp_path / "pki").coordinator
    config = tmp_path / "coordinator.toml"
    config.write_text(
        f'''
        listen = "127.0.0.1:0"
        state_directory = "{tmp_path}/state"
        log_level = "debug"
        database = "postgresql+psycopg://lab:s3cret@127.0.0.1:1/potluck?connect_timeout=1"
        [tls]
        certificate = "{files.certificate}"
        key = "{files.key}"
        authority = "{files.authority}"
        '''
    )
    ended = subprocess.run(
        [sys.executable, "-m", "potluck.server.cli", "--config", str(config)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 1
    assert "postgresql+psycopg://lab:***@127.0.0.1:1/potluck" in ended.stderr
    assert "s3cret" not in ended.stdout + ended.stderr
