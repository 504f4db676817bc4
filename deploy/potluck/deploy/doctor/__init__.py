"""Checks of a machine or a federation, with a remedy for each fault.

Imports `operator` and `view`. A configuration comes in; findings come out.
"""
