"""The large models of papers, registered in the entry-point group `potluck.models`.

Imports `potluck.common` only, since hosts and coordinators load these models. The modules contain
only models, since a run file may name any of their functions as its model.
"""
