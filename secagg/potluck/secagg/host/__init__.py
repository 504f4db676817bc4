"""A client's part in secure sums: sessions, and the masking of updates and label counts.

Messages of a session come in from the handlers; masked words and signed replies go out, after the
ledgers of `disclosure` have them. A training meets the session that its update goes into by an
appointment. The cryptography is in `potluck.secagg.protocol`. The host finds this subpackage by
name. Imports `potluck.client` and no other part of a federation.
"""
