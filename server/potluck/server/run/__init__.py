"""Drives a run: resumes it, then selects, trains and commits round by round.

Imports every subpackage except `service` and `sinks`. Reads the run's stored state, commits its
rounds to the store, and announces them to hosts and watchers.
"""
