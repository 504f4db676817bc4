"""Spans, sent to a collector in the background. The only module that imports OpenTelemetry."""

from __future__ import annotations

import logging
import random
import re
import secrets
import threading
import time
from typing import Any, Final, cast
from urllib.parse import urlsplit

from grpc import ssl_channel_credentials
from opentelemetry.exporter.otlp.proto.grpc import exporter as otlp
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)
from opentelemetry.trace import Span as CollectedSpan

from potluck.common.errors import ConfigurationError
from potluck.common.net.build_version import software_version
from potluck.common.net.proxies import direct_at_home
from potluck.common.tracing import Attributes, Span, Tracer, TracingSettings

_SECONDS: Final = 2.0
"""Timeout of an export; spans are lost if the collector does not answer in time."""
_CLOSE_SECONDS: Final = 1.0
_SAY_SECONDS: Final = 600.0
"""Minimum seconds between two log lines about lost spans, which may be frequent."""
_PARENT: Final = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")


class _Ids(IdGenerator):
    """Draws random ids without Python's global generator: the results of runs may depend on its
    draws."""

    def generate_span_id(self) -> int:
        """Return 64 random bits, not 0."""
        return secrets.randbits(64) or 1

    def generate_trace_id(self) -> int:
        """Return 128 random bits, not 0."""
        return secrets.randbits(128) or 1


class _Seldom(logging.Filter):
    """Log filter that passes one line in ten minutes."""

    def __init__(self) -> None:
        super().__init__()
        self._next = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True if the line should be written."""
        del record
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + _SAY_SECONDS
        return True


otlp.logger.setLevel(logging.ERROR)  # log only lost spans, not each attempt
otlp.logger.addFilter(_Seldom())
# The exporter draws its retry pauses: these must not use Python's global generator either.
otlp.__dict__["random"] = random.Random()


class CollectorTracer(Tracer):
    """Makes spans for a collector."""

    def __init__(self, settings: TracingSettings, service: str, instance: str) -> None:
        """Connect to the collector. See `open_tracer` for arguments and errors."""
        self.share = settings.share
        described = {
            "service.name": service,
            "service.version": software_version(),
            "service.instance.id": instance,
        }
        self._provider = TracerProvider(
            resource=Resource({name: value for name, value in described.items() if value}),
            id_generator=_Ids(),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(_exporter(settings)))
        self._tracer = self._provider.get_tracer("potluck", software_version())

    def begin(
        self,
        name: str,
        attributes: Attributes,
        *,
        parent: Span | None = None,
        linked: Span | None = None,
    ) -> Span:
        """Start a span. parent: None starts a trace. linked: related span of another trace."""
        return self._tracer.start_span(
            name,
            context=None if parent is None else set_span_in_context(cast(CollectedSpan, parent)),
            attributes=dict(attributes),
            links=[] if linked is None else [Link(cast(CollectedSpan, linked).get_span_context())],
        )

    def written(self, span: Span) -> str:
        """Return a span as text, in W3C's `traceparent` format, for processes that continue it."""
        context = cast(CollectedSpan, span).get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-01"

    def read(self, parent: str) -> Span | None:
        """Return the span of another process; None if the text is not a valid `traceparent`."""
        found = _PARENT.fullmatch(parent)
        if found is None:
            return None
        context = SpanContext(
            int(found[1], 16), int(found[2], 16), is_remote=True, trace_flags=TraceFlags(1)
        )
        return NonRecordingSpan(context) if context.is_valid else None

    def fail(self, span: Span, reason: str) -> None:
        """Mark a span as failed."""
        cast(CollectedSpan, span).set_status(Status(StatusCode.ERROR, reason))

    def close(self) -> None:
        """Send the remaining spans; give up after `_CLOSE_SECONDS`."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(_CLOSE_SECONDS)


def _exporter(settings: TracingSettings) -> OTLPSpanExporter:
    secure = settings.endpoint.startswith("https://")
    authority = None
    if settings.authority is not None:
        try:
            authority = settings.authority.read_bytes()
        except OSError as error:
            raise ConfigurationError(
                f"[tracing]: can't read the authority file {settings.authority}: {error.strerror}",
                path=settings.authority,
            ) from error
    return OTLPSpanExporter(
        endpoint=settings.endpoint,
        insecure=not secure,
        credentials=ssl_channel_credentials(authority) if secure else None,
        timeout=_SECONDS,
        # The cast is needed because the library's type hint is wrong.
        channel_options=cast(Any, direct_at_home(urlsplit(settings.endpoint).netloc)),
    )
