"""A host's part: commits to shares of seeds, recomputes cohorts, and refuses different ones.

Imports the client's code and the shared modules; coordinators don't need it.
"""
