"""Local training and evaluation, as both coordinator and hosts describe them: settings, scores,
simulated time.

Imports `settings`, `tasks` and the modules at the root. Takes settings from run files; returns
scores and descriptions of data.
"""
