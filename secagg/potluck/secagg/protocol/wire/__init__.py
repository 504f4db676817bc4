"""The messages of a session, their one form in bytes, and the signatures and digests over them.

It imports the primitives. Input: bytes from a peer, refused unless they are in that form. Output:
messages, envelopes, and rosters of verified participants.
"""
