"""Eligibility for selection: everything that excludes a client is decided here.

Imports `hosts`, `profiles` and the store. The clients that attend come in; rows to select
among go out, and events that say who is excluded.
"""
