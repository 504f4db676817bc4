"""The object store that files may go through: what is asked of it, and what is signed for hosts.

Imports `config` and `potluck.common`. Nothing that comes from the store is trusted: whoever fetches
a file verifies its digest.
"""
