"""Spans, sent to a collector by OpenTelemetry.

Imports the seam `tracer` of `potluck.common.tracing`, which finds this by name. Spans come in; they
go out over OTLP, by a thread that nobody waits for.
"""
