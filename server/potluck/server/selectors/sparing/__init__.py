"""Selectors that spare clients their uploads, from answers of the clients about their trained
models.

Imports the extension point for selectors and what they share. Offers come in, cohorts and those
spared go out.
"""
