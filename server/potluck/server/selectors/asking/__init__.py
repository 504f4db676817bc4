"""Selectors that ask clients about the model before they choose, and choose by the answers.

Imports the seam for selectors and what they share. Answers come in, cohorts go out.
"""
