"""A federation of processes on this machine: for the demo, experiments, tests and benchmarks.

Imports `operator`, `pki` and `view`. Input: options. Output: running processes and their results.
"""
