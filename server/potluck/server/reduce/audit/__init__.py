"""The audit of claimed label counts: records of each round's updates, and the statistical test.

Imports the extension point for selectors, the plan of a run and the store's records. Takes changes
of the output layer's bias and claimed label counts; returns verdicts on clients.
"""
