"""Every metric: its name, help, unit and labels, and the server that Prometheus asks.

Imports `net`, `tensors` and the modules at the root. Numbers come in from coordinator and hosts
through `instruments`; they leave over HTTP through `metrics_server`.
"""
