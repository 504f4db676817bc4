"""Small models, registered in the entry-point group `potluck.models`.

Imports nothing of Potluck, and holds nothing but models: a run file may name any function of these
modules as its model.
"""
