"""Eligibility for selection: everything that excludes a client is decided here.

Imports `hosts`, `profiles` and the store. Takes the connected clients, returns the rows to select
among, and posts events about excluded clients.
"""
