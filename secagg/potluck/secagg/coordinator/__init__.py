"""The coordinator's part in secure sums, over label counts and over masked updates.

It exchanges signed envelopes with clients and returns sums only. The coordinator finds this
subpackage by name. Imports `potluck.server` and `potluck.secagg.protocol`.
"""
