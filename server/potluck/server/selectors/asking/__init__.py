"""Selectors that first ask clients about the model, and choose a cohort from the answers.

Imports the extension point for selectors and their shared parts. Takes clients' answers, returns
cohorts.
"""
