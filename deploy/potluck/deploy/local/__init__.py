"""A federation of processes on this machine: for the demo, experiments, tests and benchmarks.

Imports `operator`, `pki` and `view`. Options come in; running processes and their results come out.
"""
