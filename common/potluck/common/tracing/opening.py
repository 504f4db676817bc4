"""A tracer, where the configuration asks for one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from potluck.common.errors import ConfigurationError
from potluck.common.settings.extras import missing_library
from potluck.common.tracing.tracing_settings import TracingSettings

if TYPE_CHECKING:
    from potluck.common.tracing.exporting import Tracer


def open_tracer(settings: TracingSettings, service: str, instance: str = "") -> Tracer | None:
    """A tracer; None where there is to be none.

    service: by which the collector knows the process, instance: which of them. Raises
    ConfigurationError where OpenTelemetry is not installed, or the authority can't be read.
    """
    if not settings.endpoint:
        return None
    try:
        from potluck.common.tracing.exporting import Tracer
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"[tracing]: {missing_library(error) or error}") from error
    return Tracer(settings, service, instance)
