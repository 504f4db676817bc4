"""A client's consent: its own policy, its ledger of sums, and the checks against both.

Input: headers and rosters that a coordinator proposes. A proposal that the policy or the ledger
forbids raises BrokenRuleError. It imports the messages and the vectors' bounds.
"""
