"""The profile phase of a run: asks clients for profiles, checks and stores them.

Imports `hosts`, the plan of a run and the store. Takes signed profiles from hosts, returns the
columns of a `Population`.
"""
