"""Disclosures: the owner's policy and budget, releases, a client's part in secure sums, the record.

Imports `base` and `potluck.common`. Requests of a coordinator come in; releases and masked numbers
come out, each in a ledger first.
"""
