"""Cohorts: checks of selections, limits on samples, and statistics of a cohort's labels. Pure.

Imports the extension point for selectors. Takes a selection, numbers of samples and disclosed
labels; returns errors and metrics.
"""
