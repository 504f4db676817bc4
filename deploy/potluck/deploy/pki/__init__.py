"""The federation's authorities: certificates, members, revocations, as files in a folder.

Imports `potluck.common`. Names and ranges come in; keys, certificates and signed records come out.
"""
