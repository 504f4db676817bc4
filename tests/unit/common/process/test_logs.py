from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import structlog

from potluck.common.process.logs import LogFormat, LogLevel, configure_logging

cygrpc: Any = import_module("grpc._cython.cygrpc")  # compiled, and without stubs


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level, configuration = root.handlers, root.level, structlog.get_config()
    yield
    root.handlers = handlers
    root.setLevel(level)
    structlog.configure(**configuration)


def test_programs_get_json_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(LogFormat.AUTO, LogLevel.INFO)  # stderr is not a terminal here
    structlog.get_logger().info("round committed", round=3)
    structlog.get_logger().debug("not written")
    output, errors = capsys.readouterr()
    assert output == ""
    line = json.loads(errors)
    assert (line["event"], line["level"], line["round"]) == ("round committed", "info", 3)
    assert line["timestamp"].endswith("Z")


def test_people_get_lines(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(LogFormat.CONSOLE, LogLevel.WARNING)
    structlog.get_logger().warning("host left", host="host-0")
    errors = capsys.readouterr().err
    assert "host left" in errors
    assert "host=host-0" in errors
    assert "\x1b" not in errors  # no colours into a file


@pytest.mark.parametrize(
    ("level", "events"),
    [(LogLevel.INFO, ["worse"]), (LogLevel.DEBUG, ["usual", "worse"]), (LogLevel.ERROR, [])],
)
def test_libraries_speak_the_same_way(
    capsys: pytest.CaptureFixture[str], level: LogLevel, events: list[str]
) -> None:
    configure_logging(LogFormat.JSON, level)
    logging.getLogger("library").info("usual")
    logging.getLogger("library").warning("worse")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["event"] for line in lines] == events


def test_a_connection_reset_is_one_line_and_other_errors_of_grpc_stay(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logging(LogFormat.JSON)
    configure_logging(LogFormat.JSON)  # does not log twice
    for error in (cygrpc.ExecuteBatchError("Failed ExecuteBatch"), ValueError("broken")):
        text = f"{type(error).__name__} raised in core by servicer method [/potluck/Attend]"
        try:
            raise error
        except Exception:
            cygrpc._LOGGER.exception(text)  # grpc's own
    reset, other = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert (reset["level"], reset["event"]) == ("info", "connection reset during a call")
    assert reset["method"] == "/potluck/Attend"
    assert "exception" not in reset
    assert (other["level"], other["event"]) == ("error", text)
    assert "ValueError: broken" in other["exception"]


def test_an_exception_stays_on_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(LogFormat.JSON)
    try:
        raise ValueError("broken")
    except ValueError:
        structlog.get_logger().exception("failed")
    line = json.loads(capsys.readouterr().err)
    assert "ValueError: broken" in line["exception"]
