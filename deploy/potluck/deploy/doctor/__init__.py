"""What is wrong with a machine or a federation, and what to do about it.

Imports `operator` and `view`. A configuration comes in; findings come out.
"""
