"""The federation's authorities: certificates, members, revocations, as files in a folder.

Imports `potluck.common`. Input: names, and ranges of clients. Output: keys, certificates and signed
records.
"""
