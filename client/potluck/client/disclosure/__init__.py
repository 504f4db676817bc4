"""What leaves a client: the owner's policy, releases, the client's part in secure sums, the record.

Imports `base` and `potluck.common`. Requests of a coordinator come in; releases and masked numbers
come out, each in a ledger first.
"""
