"""Messages and metrics about a run.

Imports the state machine's events and the store. What happens comes in; messages for those who
watch and figures for Prometheus go out.
"""
