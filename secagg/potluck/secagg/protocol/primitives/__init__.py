"""The mathematics of a session, on bytes and numbers: masks, shares, keys, thresholds, groups.

Input: seeds, secrets, roster digests and numbers of clients. Output: keystreams, shares, keys and
thresholds. It imports `rules`, and no other subpackage.
"""
