"""Cohorts: checks of selections, limits on samples, and the labels of a cohort together. Pure.

Imports the seam for selectors. A selection, numbers of samples and disclosed labels come in; errors
and figures come out.
"""
