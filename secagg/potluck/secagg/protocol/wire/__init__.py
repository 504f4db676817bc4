"""The messages of a session, their one form in bytes, and the signatures and digests over them.

It imports the primitives. Bytes from a peer come in and are refused unless they are in that form;
messages, envelopes and rosters of verified participants go out.
"""
