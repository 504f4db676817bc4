"""A client's consent: its own policy, its ledger of sums, and the checks against both.

It imports the messages and the vectors' bounds. Headers and rosters that a coordinator proposes
come in; a proposal against the policy or the ledger raises BrokenRuleError.
"""
