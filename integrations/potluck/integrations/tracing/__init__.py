"""Spans, sent to a collector by OpenTelemetry.

Imports the extension point `potluck.common.tracing`, which finds this subpackage by
name. A background thread, for which no caller waits, sends the spans over OTLP.
"""
