"""Availability traces: generated ones, and ones converted from FedScale.

Output: a CSV file that `virtual_clock.trace` of a run file names.
"""
