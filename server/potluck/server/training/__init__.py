"""Training on the coordinator, in a separate process with torch and public data.

Imports `aggregation`, the plan of a run and the extension point for strategies. Takes a job with a
run file, the round's model and updates; returns a file with the trained model.
"""
