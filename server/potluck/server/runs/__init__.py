"""Drives a run: resumes it, then selects, trains and commits round by round.

Imports every subpackage except `service`. Reads the run's stored state, commits rounds, and
announces them to hosts and watchers.
"""
