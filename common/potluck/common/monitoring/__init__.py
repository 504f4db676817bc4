"""Defines every metric (name, help, unit and labels), and the server that Prometheus queries.

Imports `net`, `tensors` and the modules at the root. Coordinator and hosts set numbers through
`instruments`; `metrics_server` sends them over HTTP.
"""
