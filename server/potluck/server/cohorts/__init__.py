"""Cohorts: checks of selections, limits on samples, and the labels of a cohort together. Pure.

Imports the extension point for selectors. Takes a selection, numbers of samples and disclosed
labels; returns errors and metrics.
"""
