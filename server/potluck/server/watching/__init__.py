"""What people and metrics learn of a run.

Imports the state machine's events and the store. What happens comes in; messages for those who
watch and figures for Prometheus go out.
"""
