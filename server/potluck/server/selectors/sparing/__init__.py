"""Selectors that spare clients their uploads, once these have said what their models are like.

Imports the seam for selectors and what they share. Offers come in, cohorts and those spared go out.
"""
