"""Availability traces: generated ones, and converted ones of FedScale.

Output: a CSV file that `virtual_clock.trace` of a run file names.
"""
