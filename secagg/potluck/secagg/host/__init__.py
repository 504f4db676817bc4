"""A client's part in secure sums: sessions, and the masking of updates and label counts.

Input: a session's messages, from the handlers. Output: masked words and signed replies, each
recorded in a ledger before it is sent. An `Appointment` connects a training with the session for
its update. The cryptography is in `potluck.secagg.protocol`. The host finds this subpackage by
name. Imports `potluck.client` and no other part of a federation.
"""
