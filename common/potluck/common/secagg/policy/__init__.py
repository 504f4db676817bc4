"""A client's consent: its own policy, its ledger of sums, and the checks against both.

The room imports the messages and the vectors' bounds. Headers, rosters and query logs that a
coordinator proposes come in; a proposal against the policy or the ledger raises BrokenRuleError.
"""
