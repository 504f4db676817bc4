"""A host's part: each client's ledger, training with noise, and noise on answers and updates.

Imports the client's code and the accounting; coordinators don't need it.
"""
