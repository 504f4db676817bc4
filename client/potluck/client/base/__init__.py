"""Parts that the whole host uses: its state directory, worker threads, pauses, noise, metrics.

Imports `potluck.common` only.
"""
