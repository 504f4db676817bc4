"""Traces for OpenTelemetry: what a round's time went into, on the coordinator and on its hosts.

Off unless configured; then `exporting` alone imports OpenTelemetry. Spans come in by `Tracer`; they
go out to a collector over OTLP, by a thread that nobody waits for.
"""
