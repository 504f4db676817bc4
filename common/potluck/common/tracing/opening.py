"""A tracer, where the configuration asks for one."""

from __future__ import annotations

from typing import cast

from potluck.common.errors import ConfigurationError, PluginError
from potluck.common.settings import plugins
from potluck.common.settings.extras import missing_library
from potluck.common.tracing.tracer import Tracer
from potluck.common.tracing.tracing_settings import TracingSettings


def open_tracer(settings: TracingSettings, service: str, instance: str = "") -> Tracer | None:
    """A tracer; None where there is to be none.

    service: by which the collector knows the process, instance: which of them. Raises
    ConfigurationError where OpenTelemetry is not installed, or the authority can't be read.
    """
    if not settings.endpoint:
        return None
    try:
        maker = plugins.find_callable(plugins.INTEGRATIONS, "tracing")
    except PluginError as error:
        why = missing_library(error.__cause__) or error.message
        raise ConfigurationError(f"[tracing]: {why}") from error
    return cast(Tracer, maker(settings, service, instance))
