"""The client's side of a session: a pure state machine with one entrance for each event.

It imports the policy, the messages and the primitives. Envelopes and a `Situation` come in; a
`ClientStep` goes out: the next session, replies, and the entries for the ledger.
"""

from potluck.secagg.protocol.client.client_side import begin, handle, refuse, uploaded

__all__ = ["begin", "handle", "refuse", "uploaded"]
