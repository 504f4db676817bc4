"""Spans, sent to a collector by OpenTelemetry.

Imports the extension point `potluck.common.tracing`, which finds this subpackage by name. A
background thread sends the spans over OTLP; no caller waits for it.
"""
