"""Checks of a machine or a federation, with a remedy for each fault.

Imports `operator` and `view`. Input: a configuration. Output: findings.
"""
