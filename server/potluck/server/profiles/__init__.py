"""The profile phase of a run: asks clients for profiles, checks and stores them.

Imports `hosts`, `aggregation` and the store. Takes signed profiles from hosts, returns the columns
of a `Population`.
"""
