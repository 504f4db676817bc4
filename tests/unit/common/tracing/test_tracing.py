"""The tracing endpoint, the choice of traced rounds, and spans passed between processes."""

from __future__ import annotations

import random
import sys
import time

import pytest
from opentelemetry.trace import Span as CollectedSpan

from potluck.common.errors import ConfigurationError
from potluck.common.settings.configuration import validate
from potluck.common.tracing import TracingSettings, is_traced, open_tracer

AWAY = TracingSettings(endpoint="http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("share", "traced"),
    [(1.0, [1, 2, 3, 4, 5, 6]), (0.5, [2, 4, 6]), (0.34, [3, 6]), (0.01, [])],
)
def test_traced_rounds_are_spread_evenly(share: float, traced: list[int]) -> None:
    assert [number for number in range(1, 7) if is_traced(number, share)] == traced


@pytest.mark.parametrize("endpoint", ["localhost:4317", "grpc://x:1", "http://x", "http://x:1/v1"])
def test_invalid_tracing_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigurationError, match="'endpoint': must be http://HOST:PORT or https"):
        validate(TracingSettings, {"endpoint": endpoint}, source="x")


def test_no_tracer_is_opened_without_an_endpoint() -> None:
    assert open_tracer(TracingSettings(), "potluck-host") is None


def test_tracing_without_opentelemetry_names_the_missing_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "potluck.integrations.tracing.exporting", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    why = r"\[tracing\]: opentelemetry is not installed; .* pip install '\.\[tracing\]'"
    with pytest.raises(ConfigurationError, match=why):
        open_tracer(AWAY, "potluck-host")


def test_unreachable_collector_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from opentelemetry.exporter.otlp.proto.grpc.exporter import logger

    tracer = open_tracer(AWAY, "potluck-host")
    assert tracer is not None
    random.seed(7)
    before = random.getstate()
    tracer.begin("round", {}).end()
    tracer.close()
    assert random.getstate() == before
    later = time.monotonic() + 3600
    monkeypatch.setattr(time, "monotonic", lambda: later)
    caplog.clear()
    for _ in range(3):
        logger.warning("trying again")
        logger.error("spans are lost")
    said = [each for each in caplog.records if each.name == logger.name]
    assert [each.levelname for each in said] == ["ERROR"]


def test_span_is_restored_from_its_text() -> None:
    tracer = open_tracer(AWAY, "potluck-coordinator")
    assert tracer is not None
    span = tracer.begin("round", {"potluck.round": 3})
    found = tracer.read(tracer.written(span))
    assert isinstance(found, CollectedSpan)
    assert isinstance(span, CollectedSpan)
    assert found.get_span_context().span_id == span.get_span_context().span_id
    assert found.get_span_context().trace_id == span.get_span_context().trace_id
    for text in ("", "00-1-2-01", f"00-{'0' * 32}-{'0' * 16}-01", f"00-{'x' * 32}-{'1' * 16}-01"):
        assert tracer.read(text) is None
    begun = time.monotonic()
    tracer.close()  # no collector runs
    assert time.monotonic() - begun < 20
