"""Turns a round's updates into the next model: combines them, applies the strategy, or trains here.

Imports the extension points, the plan of a run and the store's records. Takes verified update
files, returns published model files. Blocking: runs in worker threads. Training on the coordinator
has a process of its own.
"""
