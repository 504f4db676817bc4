"""Secure sums, driven from the coordinator's side: over label counts, and over masked updates.

Imports `hosts`, the store and `potluck.common.secagg`. Sealed envelopes come in and go out; only
sums come out.
"""
