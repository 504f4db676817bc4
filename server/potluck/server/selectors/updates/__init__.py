"""Selectors that learn from the updates themselves, which secure aggregation hides.

Imports the seam for selectors, and the steps that all selectors share. Facts of a round's updates
come in; a judgement of them, and later cohorts, come out.
"""
