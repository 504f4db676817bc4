"""Traces: how the time of a round is spent, on the coordinator and on its hosts.

Tracing is off unless it is configured. Then `opening` finds the class that creates spans and sends
them to a collector; it is found by its entry-point name.
"""
