"""The tasks `digits` and `colored-digits`, and parts of tasks: partitions, label noise.

Imports the modules at the root. Takes options; returns the clients' samples.
"""
