"""A run's state machine, which is pure, and the plan of a run.

Imports the extension points and the store's records; no clock, network or disk. Takes events,
returns actions: `potluck.server.runs` creates the events and carries out the actions.
"""
