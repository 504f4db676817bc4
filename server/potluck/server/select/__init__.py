"""Selects a round's cohort: asks clients the selector's questions, and checks its choice.

Imports `live`, `eligibility` and the update paths. Takes actions of the state machine, stores the
cohort, and posts what was selected. It also has the selector decide which clients skip the upload.
"""
