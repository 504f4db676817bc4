"""The audit of claimed label counts: what is noted of each round's updates, and the reckoning.

Imports the seam for selectors, the plan of a run and the store's records. Moves of the output bias
and claims come in, verdicts on clients come out.
"""
