"""Disclosures: the owner's policy and budget, the releases, their noise and ledgers, the report.

Imports `base` and `potluck.common`. Input: requests of a coordinator. Output: releases; each is
written to a ledger before it is sent.
"""
