"""Bandit selectors: methods for other problems, adapted to the contexts and rewards of FLASH.

Imports the extension point for selectors and their shared parts. Takes clients' answers, returns
cohorts.
"""
