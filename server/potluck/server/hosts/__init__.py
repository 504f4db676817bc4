"""The hosts that attend and what they are asked to do.

Imports the store, the plan of a run and the model files. Instructions come in from runs and go out
on the control streams; answers and acknowledgements come back.
"""
