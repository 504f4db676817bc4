"""Parts that the whole host uses: its state directory, worker threads, pauses, metrics.

Imports `potluck.common` only.
"""
