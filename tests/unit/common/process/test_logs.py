from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import structlog

from potluck.common.process.logs import LogFormat, LogLevel, configure_logging

cygrpc: Any = import_module("grpc._cython.cygrpc")  # a compiled module without type stubs


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level, configuration = root.handlers, root.level, structlog.get_config()
    yield
    root.handlers = handlers
    root.setLevel(level)
    for name in ("urllib3", "botocore"):
        logging.getLogger(name).setLevel(logging.NOTSET)
    structlog.configure(**configuration)


def test_log_to_a_pipe_is_json_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(LogFormat.AUTO, LogLevel.INFO)  # stderr is not a terminal here
    structlog.get_logger().info("round committed", round=3)
    structlog.get_logger().debug("not written")
    output, errors = capsys.readouterr()
    assert output == ""
    line = json.loads(errors)
    assert (line["event"], line["level"], line["round"]) == ("round committed", "info", 3)
    assert line["timestamp"].endswith("Z")


def test_console_log_is_plain_lines_without_colours_in_a_file(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logging(LogFormat.CONSOLE, LogLevel.WARNING)
    structlog.get_logger().warning("host left", host="host-0")
    errors = capsys.readouterr().err
    assert "host left" in errors
    assert "host=host-0" in errors
    assert "\x1b" not in errors  # no colours in a file


@pytest.mark.parametrize(
    ("level", "events"),
    [(LogLevel.INFO, ["worse"]), (LogLevel.DEBUG, ["usual", "worse"]), (LogLevel.ERROR, [])],
)
def test_log_records_of_libraries_have_the_same_format(
    capsys: pytest.CaptureFixture[str], level: LogLevel, events: list[str]
) -> None:
    configure_logging(LogFormat.JSON, level)
    logging.getLogger("library").info("usual")
    logging.getLogger("library").warning("worse")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["event"] for line in lines] == events


@pytest.mark.parametrize(
    ("level", "events"),
    [(LogLevel.INFO, ["failed"]), (LogLevel.DEBUG, ["usual", "failed"]), (LogLevel.ERROR, [])],
)
@pytest.mark.parametrize("library", ["urllib3.connectionpool", "botocore.auth"])
def test_log_never_contains_the_urls_of_requests(
    capsys: pytest.CaptureFixture[str], library: str, level: LogLevel, events: list[str]
) -> None:
    configure_logging(LogFormat.JSON, level)
    logging.getLogger(library).debug("GET /models?X-Amz-Signature=secret")
    logging.getLogger(library).info("usual")
    logging.getLogger(library).warning("failed")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["event"] for line in lines] == events


def test_connection_reset_is_logged_in_one_line_and_other_grpc_errors_in_full(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logging(LogFormat.JSON)
    configure_logging(LogFormat.JSON)  # does not log twice
    for error in (cygrpc.ExecuteBatchError("Failed ExecuteBatch"), ValueError("broken")):
        text = f"{type(error).__name__} raised in core by servicer method [/potluck/Attend]"
        try:
            raise error
        except Exception:
            cygrpc._LOGGER.exception(text)  # as gRPC itself logs
    reset, other = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert (reset["level"], reset["event"]) == ("info", "connection reset during a call")
    assert reset["method"] == "/potluck/Attend"
    assert "exception" not in reset
    assert (other["level"], other["event"]) == ("error", text)
    assert "ValueError: broken" in other["exception"]


def test_logged_exception_is_part_of_its_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(LogFormat.JSON)
    try:
        raise ValueError("broken")
    except ValueError:
        structlog.get_logger().exception("failed")
    line = json.loads(capsys.readouterr().err)
    assert "ValueError: broken" in line["exception"]
