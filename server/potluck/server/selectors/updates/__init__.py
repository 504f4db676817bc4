"""Selectors that learn from the updates themselves, which secure aggregation hides.

Imports the extension point for selectors and their shared parts. Takes facts about a round's
updates, returns a judgement on these and later cohorts.
"""
