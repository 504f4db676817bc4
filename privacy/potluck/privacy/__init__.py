"""Differential privacy of training: accounting, each client's ledger, training with noise.

The core does not import this package. It finds what it needs by name, in the entry-point group
`potluck.integrations`, and refuses a private run if the package or its libraries (the extra
`privacy`) are missing.
"""
