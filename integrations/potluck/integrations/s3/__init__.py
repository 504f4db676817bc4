"""The object store that files may go through: what is asked of it, and what is signed for hosts.

Fills the seam `file_store` of the coordinator and, by `store_requests` alone, that of a host's
`transfer`; both find it by name. Nothing that comes from the store is trusted: whoever fetches a
file verifies its digest.
"""
