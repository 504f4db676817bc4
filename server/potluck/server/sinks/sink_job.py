"""Checks the sinks in a coordinator's configuration when it starts."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict

from potluck.common.errors import ConfigurationError, PluginError
from potluck.common.names import is_name
from potluck.common.settings import plugins
from potluck.common.settings.extras import not_installed
from potluck.common.settings.old_spelling import current_keys
from potluck.server.sink import Sink

PLUGIN = "plugin"
SILENCE = "silence_timeout_seconds"
_SILENCE_SECONDS = 120.0

OLD_KEYS: Final = {"patience_seconds": SILENCE}
"""Old → new name of each key of a sink's table that was renamed before 0.1."""


class SinkJob(BaseModel):
    """Settings of a sink, which its process receives.

    folder: working directory of the process; relative paths in the sink's options start there.
    silence_timeout_seconds: seconds without a message during work after which the process is
    restarted.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    plugin: str
    options: dict[str, Any]
    silence_timeout_seconds: float
    database: str
    folder: Path


def sink_jobs(
    tables: Mapping[str, Mapping[str, Any]], *, database: str, state_directory: Path
) -> list[SinkJob]:
    """Return the job of each `[sinks.NAME]` table, without importing the sinks' libraries.

    Raises ConfigurationError if a table is invalid or two tables conflict; PluginError if a sink is
    not installed, if its library is missing, or if it refuses its options.
    """
    jobs = [_job(name, dict(table), database, state_directory) for name, table in tables.items()]
    _check_alone(jobs)
    return jobs


def make_sink(job: SinkJob) -> Sink:
    """Create the sink of a job. Raises PluginError."""
    return plugins.create(Sink, job.plugin, job.options)


def _job(name: str, table: dict[str, Any], database: str, state_directory: Path) -> SinkJob:
    where = f"[sinks.{name}]"
    if not is_name(name):
        raise ConfigurationError(
            f"{where}: the name of a sink may contain only letters, digits, dots, dashes and "
            "underscores; rename the sink",
            sink=name,
        )
    table = current_keys(table, OLD_KEYS, source=where)
    plugin, silence = table.pop(PLUGIN, name), table.pop(SILENCE, _SILENCE_SECONDS)
    if not isinstance(plugin, str):
        raise ConfigurationError(f"{where}: {PLUGIN} is {plugin!r}, but must be a text", sink=name)
    number = isinstance(silence, (int, float)) and not isinstance(silence, bool)
    # the process gets JSON, which has neither inf nor nan
    if not number or not 0 < silence < math.inf:
        raise ConfigurationError(
            f"{where}: {SILENCE} is {silence!r}, but must be a number above 0", sink=name
        )
    job = SinkJob(
        name=name,
        plugin=plugin,
        options=table,
        silence_timeout_seconds=silence,
        database=database,
        folder=(state_directory / "sinks" / name).resolve(),
    )
    try:
        sink = make_sink(job)
    except PluginError as error:
        raise PluginError(f"{where}: {error.message}", sink=name) from error
    if sink.library and not _is_installed(sink.library):
        raise PluginError(
            f"{where}: {not_installed(sink.library, sink.extra or sink.library)}",
            sink=name,
        )
    return job


def _check_alone(jobs: Sequence[SinkJob]) -> None:
    """Raise ConfigurationError if two sinks of the same kind would write the same files."""
    found: dict[tuple[str, Path], str] = {}
    for job in jobs:
        option = make_sink(job).alone_in
        if not option:
            continue
        folder = (job.folder / str(job.options.get(option, "."))).resolve()
        other = found.setdefault((job.plugin, folder), job.name)
        if other != job.name:
            raise ConfigurationError(
                f"[sinks.{other}] and [sinks.{job.name}] both record to {folder}; give each sink "
                f"its own {option}",
                sink=job.name,
            )


def _is_installed(library: str) -> bool:
    try:
        return importlib.util.find_spec(library) is not None
    except ModuleNotFoundError:  # the sink's package is not installed
        return False
