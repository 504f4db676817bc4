"""The operator's side of the protocol: calls to a coordinator, and their answers as plain values.

Imports `potluck.common`. Sends run files; receives statuses, profiles and models.
"""
