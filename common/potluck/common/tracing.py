"""Traces: how the time of a round is spent, on the coordinator and on its hosts.

Tracing is off unless it is configured. The class that creates spans and sends them to a collector
is then found by its entry-point name.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, cast

from pydantic import Field, field_validator

from potluck.common.errors import ConfigurationError, PluginError
from potluck.common.settings import plugins
from potluck.common.settings.configuration import Settings
from potluck.common.settings.extras import MissingLibraryError

# The extension point ------------------------------------------------------------------------------

Attributes = Mapping[str, str | int | float]


class Span(Protocol):
    """A named period of time in a trace."""

    def end(self) -> None:
        """End the span now."""


class Tracer(ABC):
    """Creates spans. Thread-safe. It never blocks or fails; it drops spans instead.

    share: share of the rounds that are traced, in [0, 1].
    """

    share: float

    @abstractmethod
    def begin(
        self,
        name: str,
        attributes: Attributes,
        *,
        parent: Span | None = None,
        linked: Span | None = None,
    ) -> Span:
        """Start a span. parent: the enclosing span; None to start a new trace. linked: a related
        span of another trace."""

    @abstractmethod
    def written(self, span: Span) -> str:
        """Return a span as text for other processes, in the format of W3C's `traceparent`."""

    @abstractmethod
    def read(self, parent: str) -> Span | None:
        """Return another process's span from its text; None if the text is not a valid span."""

    @abstractmethod
    def fail(self, span: Span, reason: str) -> None:
        """Mark a span as failed."""

    @abstractmethod
    def close(self) -> None:
        """Send the remaining spans; take a short time at most."""


# The table `[tracing]` ----------------------------------------------------------------------------


class TracingSettings(Settings):
    """Destination of spans; by default none are sent."""

    endpoint: str = Field(
        default="",
        description="Address of the collector that receives OpenTelemetry spans, OTLP over gRPC:\n"
        "http://HOST:PORT or https://HOST:PORT. The collector learns how long clients train, if\n"
        "the run discloses exact numbers of samples. Empty: no traces are sent.",
    )
    authority: Path | None = Field(
        default=None,
        description="Certificate of the authority that signs the collector's https certificate.\n"
        "Unset: public authorities.",
    )
    share: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Share of the rounds that are traced, evenly spread. The coordinator's value\n"
        "applies to its hosts, too.",
    )

    @field_validator("endpoint")
    @classmethod
    def _an_address(cls, endpoint: str) -> str:
        if endpoint and re.fullmatch(r"https?://[^/?#@\s]+:\d+/?", endpoint) is None:
            raise ValueError("must be http://HOST:PORT or https://HOST:PORT")
        return endpoint.rstrip("/")


def is_traced(number: int, share: float) -> bool:
    """Return whether a round is traced; traced rounds are evenly spread. number: number of the
    round, from 1."""
    return int(number * share) > int((number - 1) * share)


# The tracer of a process --------------------------------------------------------------------------


def open_tracer(settings: TracingSettings, service: str, instance: str = "") -> Tracer | None:
    """Return a tracer; None if the configuration requests none.

    service: service name for the collector. instance: name that distinguishes this process from
    other processes of the service. Raises ConfigurationError if OpenTelemetry is not installed, or
    the authority's certificate can't be read.
    """
    if not settings.endpoint:
        return None
    try:
        maker = plugins.integration("tracing")
    except (MissingLibraryError, PluginError) as error:
        raise ConfigurationError(f"[tracing]: {error.message}") from error
    return cast(Tracer, maker(settings, service, instance))
