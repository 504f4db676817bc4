"""Messages and metrics about a run.

Imports the state machine's events and the store. Takes events of a run, returns messages for
watchers and metrics for Prometheus.
"""
