"""The mathematics of a session, on bytes and numbers: masks, shares, keys, thresholds, groups.

It imports the rules that it can find broken, and no other subpackage. Seeds, secrets, roster
digests and counts of clients come in; keystreams, shares, keys and numbers go out.
"""
