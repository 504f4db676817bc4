"""Turns a round's updates into the next model: stores and combines them, then applies the strategy.

Imports the extension points, `cohorts`, the plan of a run and the store's records. Takes verified
update files, returns published model files. Blocking: runs in worker threads.
"""
