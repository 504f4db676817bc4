"""A run's state machine, which is pure: events, actions, the clients, waits and late updates.

Imports the extension point for selectors and the store's records; no clock, network or disk. Takes
events, returns actions: `potluck.server.run` creates the events and carries out the actions.
"""
