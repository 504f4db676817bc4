"""Training on the coordinator, in a process of its own that has torch and public data.

Imports `aggregation`, the plan of a run and the seam for strategies. In comes a job: a run's file,
the round's model and updates, all of them files. Out goes a file with the trained model.
"""
