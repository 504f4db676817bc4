"""The plan of a run: its parts, its rules, the checks that they are compatible, and when it ends.

Imports the extension points, the state machine's settings and the store's records. Takes a run
file; returns the objects that it names, or an error that names the cause.
"""
