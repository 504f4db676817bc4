"""Cohorts: whether a selection makes sense, caps on picks, what a cohort's labels add up to. Pure.

Imports the seam for selectors. A selection and the counts of picks come in; rows, alarms and
figures come out.
"""
