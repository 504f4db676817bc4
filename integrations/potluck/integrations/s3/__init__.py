"""The S3 object store for files: requests to it, and URLs that are signed for hosts.

It implements the coordinator's extension point `file_store`. Its module `store_requests` implements
the extension point of the client's `transfer`. The core finds both by name. Content of the store is
never trusted: the receiver of a file verifies its digest.
"""
