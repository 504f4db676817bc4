"""The mathematics of a session, on bytes and numbers: masks, shares, keys, thresholds, groups.

The room imports the rules that it can find broken, and otherwise no other room. Seeds, secrets,
roster digests and counts of clients come in; keystreams, shares, keys and numbers go out.
"""
