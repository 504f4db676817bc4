"""Creates the tracer that the configuration requests."""

from __future__ import annotations

from typing import cast

from potluck.common.errors import ConfigurationError, PluginError
from potluck.common.settings import plugins
from potluck.common.settings.extras import MissingLibraryError
from potluck.common.tracing.tracer import Tracer
from potluck.common.tracing.tracing_settings import TracingSettings


def open_tracer(settings: TracingSettings, service: str, instance: str = "") -> Tracer | None:
    """Return a tracer; None if the configuration requests none.

    service: service name for the collector. instance: name of this process among those of the
    service. Raises ConfigurationError if OpenTelemetry is not installed, or the authority's
    certificate can't be read.
    """
    if not settings.endpoint:
        return None
    try:
        maker = plugins.integration("tracing")
    except (MissingLibraryError, PluginError) as error:
        raise ConfigurationError(f"[tracing]: {error.message}") from error
    return cast(Tracer, maker(settings, service, instance))
