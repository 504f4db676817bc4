"""Traces: what a round's time went into, on the coordinator and on its hosts.

Off unless configured; then `opening` finds by name what makes spans and sends them to a collector.
"""
