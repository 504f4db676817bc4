"""The client's side of a session: a pure state machine with one function for each event.

Input: envelopes and a `Situation`. Output: a `ClientStep` with the next session, the replies, and
the entries for the ledger. It imports the policy, the messages and the primitives.
"""

from potluck.secagg.protocol.client.client_side import begin, handle, refuse, uploaded

__all__ = ["begin", "handle", "refuse", "uploaded"]
