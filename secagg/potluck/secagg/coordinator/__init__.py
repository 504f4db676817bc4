"""Secure sums, driven from the coordinator's side: over label counts, and over masked updates.

Sealed envelopes come in and go out; only sums come out. The coordinator finds this subpackage by
name. Imports `potluck.server`, and of this package `protocol`.
"""
