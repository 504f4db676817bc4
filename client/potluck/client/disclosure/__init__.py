"""Disclosures: the owner's policy and budget, what was released, the ledgers, the record.

Imports `base` and `potluck.common`. Requests of a coordinator come in; releases come out, each in a
ledger first.
"""
