"""A trace collector that receives OTLP over gRPC and stores the spans."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True, kw_only=True)
class ReceivedSpan:
    """A span. service: name of the service. Ids are bytes; parent is empty for a root span."""

    service: str
    name: str
    trace: bytes
    id: bytes
    parent: bytes
    links: tuple[bytes, ...]
    begin: int
    end: int
    failed: bool
    attributes: dict[str, Any]


@dataclass
class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """A collector; `spans` are in the order of arrival."""

    port: int = 0
    spans: list[ReceivedSpan] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802  # the protocol's
        """Store the spans of a request."""
        found = [
            _received(str(_attributes(of.resource.attributes)["service.name"]), span)
            for of in request.resource_spans
            for scope in of.scope_spans
            for span in scope.spans
        ]
        with self._lock:
            self.spans += found
        return trace_service_pb2.ExportTraceServiceResponse()


def _received(service: str, span: Any) -> ReceivedSpan:
    return ReceivedSpan(
        service=service,
        name=span.name,
        trace=span.trace_id,
        id=span.span_id,
        parent=span.parent_span_id,
        links=tuple(link.span_id for link in span.links),
        begin=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
        failed=span.status.code == 2,
        attributes=_attributes(span.attributes),
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in pairs}


@contextmanager
def running_collector() -> Iterator[Collector]:
    """Run a collector on a free port of this machine."""
    server = grpc.server(ThreadPoolExecutor(2))
    collector = Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]  # generated
    collector.port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()
