"""Bandits with the contexts and rewards of FLASH, adapted from methods for other problems.

Imports the extension point for selectors and their shared parts. Takes clients' answers, returns
cohorts.
"""
