"""Local training and evaluation as both sides speak of them: settings, scores, simulated time.

Imports `settings`, `tasks` and the modules at the root. Settings come in from run files;
scores and descriptions of data come out.
"""
