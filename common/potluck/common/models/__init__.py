"""Small models, registered in the entry-point group `potluck.models`.

Imports nothing from Potluck and contains only models, because a run file may name any function of
these modules as its model.
"""
