"""The connection between coordinator and hosts: TLS, identities, members, versions, frames of
files.

Imports `potluck.common.tensors` and the modules at the root. Takes bytes from a peer and checks
them; returns an identity, a verified file, or one error.
"""
