"""Bandits on the contexts and rewards of FLASH, adapted from methods that are not about clients.

Imports the seam for selectors and what they share. Answers come in, cohorts go out.
"""
