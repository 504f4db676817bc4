"""The operator's side of the wire: calls to a coordinator, and what comes back as values.

Imports `potluck.common`. Run files go up; statuses, profiles and models come down.
"""
