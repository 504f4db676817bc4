"""Eligibility for selection: decides which clients are excluded, for any reason.

Imports `hosts`, `profiles`, the plan of a run and the store. Takes the connected clients, returns
the rows to select among, and posts events about excluded clients.
"""
