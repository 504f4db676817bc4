"""Noise that the coordinator adds to a round's sum of updates, and its ledger of noisy sums.

Imports the server's code and the accounting; hosts don't need it.
"""
