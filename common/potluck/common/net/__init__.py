"""The wire, as both sides speak it: TLS, identities, members, versions, frames of files.

Imports `potluck.common.tensors` and the modules at the root. Bytes of a peer come in here and are
checked; what comes out is an identity, a verified file, or one error.
"""
