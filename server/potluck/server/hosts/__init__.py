"""The connected hosts, and the instructions sent to them.

Imports the store, the plan of a run and the model files. Takes instructions from runs, sends them
on the control streams, and returns answers and acknowledgements.
"""
