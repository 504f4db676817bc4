"""Noise that the coordinator adds to the sum of a round's updates, and its ledger.

Imports the server's code and the accounting; hosts don't need it.
"""
