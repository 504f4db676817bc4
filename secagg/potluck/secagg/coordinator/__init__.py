"""The coordinator's part in secure sums of label counts and of masked updates.

It receives clients' signed messages and returns sums only. The core's coordinator finds this
subpackage by name. Imports `potluck.server` and `potluck.secagg.protocol`.
"""
