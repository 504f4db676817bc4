"""The messages of a session, their only serialised form, and the signatures and digests over them.

It imports the primitives. Input: bytes from a peer, refused unless they have exactly that form.
Output: messages, envelopes, and rosters of verified participants.
"""
