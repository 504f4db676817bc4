"""From a round's updates to its model: the spool, the reduction, the strategy's step.

Imports the seams, `cohorts`, the plan of a run and the store's records. Verified update files
come in; published model files come out. Blocking: runs in worker threads.
"""
