"""The tasks `digits` and `colored-digits`, and what tasks are built on: partitions, label noise.

Imports the modules at the root. Options come in; samples of clients go out.
"""
