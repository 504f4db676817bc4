"""Structured logs on stderr: readable lines on a terminal, JSON objects elsewhere.

Standard output is only for results. An event is a short constant phrase; everything that varies is
a separate field: `log.info("round committed", run=run_id, round=3)`. Before a line is written,
control characters in all its texts are escaped, and passwords are removed.
"""

from __future__ import annotations

import logging
import sys
from enum import StrEnum
from typing import Any, Final

import structlog

from potluck.common.plain_text import plain, without_passwords

_GRPC: Final = "grpc._cython.cygrpc"
"""The logger of gRPC's core."""

_LOG_URLS: Final = ("urllib3", "botocore")
"""Loggers that write whole URLs at level debug; a presigned URL grants access to a file."""


class LogFormat(StrEnum):
    """Form of a log line."""

    AUTO = "auto"
    CONSOLE = "console"
    JSON = "json"


class LogLevel(StrEnum):
    """Minimum severity of the lines that are written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def configure_logging(
    format: LogFormat = LogFormat.AUTO,  # noqa: A002  # the setting's name everywhere
    level: LogLevel = LogLevel.INFO,
) -> None:
    """Write every log line of this process to stderr. AUTO: console format on a terminal, else
    JSON.

    Lines of libraries that use the standard `logging` have the same format; of these, only warnings
    and errors are written, unless `level` is debug. Libraries that would then log whole URLs write
    no debug lines. May be called again.
    """
    console = format is LogFormat.CONSOLE or (format is LogFormat.AUTO and sys.stderr.isatty())
    number = getattr(logging, level.name)
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        _fit_to_show,
    ]
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
        if console
        else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    grpc_log = logging.getLogger(_GRPC)
    grpc_log.filters = [_one_line_for_a_reset]
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(number if level is LogLevel.DEBUG else max(number, logging.WARNING))
    for name in _LOG_URLS:
        logging.getLogger(name).setLevel(max(root.level, logging.INFO))


def _one_line_for_a_reset(record: logging.LogRecord) -> bool:
    """Filter gRPC's log: replace the report of a connection that breaks during a call by one line
    at level info.

    gRPC logs it as an error with a traceback. Returns True if the record is logged unchanged.
    """
    error = record.exc_info[1] if record.exc_info else None
    if type(error).__name__ != "ExecuteBatchError":
        return True
    method = record.getMessage().partition("[")[2].rpartition("]")[0]
    structlog.get_logger().info("connection reset during a call", method=method)
    return False


def _fit_to_show(
    _logger: Any, _method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Remove control characters from all texts of an event (a structlog processor). Tracebacks keep
    their line breaks."""
    lines = event.pop("exception", None)
    fit = {plain(key): _plain_value(value) for key, value in event.items()}
    if lines is not None:
        fit["exception"] = "\n".join(
            line[: len(line) - len(line.lstrip(" "))] + str(_plain_value(line.lstrip(" ")))
            for line in lines.splitlines()
        )
    return fit


def _plain_value(value: object) -> object:
    if isinstance(value, str):
        return plain(without_passwords(value))
    if isinstance(value, dict):
        return {_plain_value(key): _plain_value(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_value(each) for each in value]
    return value
