"""A run in progress: it is resumed, then selects, trains and commits round by round.

Imports every subpackage except `service`. Reads the run's stored state, and commits rounds, which
it announces to hosts and watchers.
"""
