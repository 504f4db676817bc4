"""A host's part: commits to shares of seeds, recomputes cohorts, and refuses others.

Imports the client's code and the shared modules; coordinators don't need it.
"""
