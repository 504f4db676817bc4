"""Turns a round's updates into its model: the spool, the reduction, the strategy's step.

Imports the extension points, `cohorts`, the plan of a run and the store's records. Takes verified
update files, returns published model files. Blocking: runs in worker threads.
"""
