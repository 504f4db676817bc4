"""The object store that files may go through: what is asked of it, and what is signed for hosts.

It implements the coordinator's extension point `file_store` and, with `store_requests` alone, that
of a host's `transfer`. Both find it by name. Content of the store is never trusted: the receiver of
a file verifies its digest.
"""
