"""The large models of papers, registered in the entry-point group `potluck.models`.

Imports `potluck.common` only: hosts and coordinators load these models, and nothing else is here,
since a run file may name any function of these modules as its model.
"""
