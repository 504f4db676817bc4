"""Grids of settings × seeds: an experiment's file, its cells, and a federation for each of them.

Imports `presets` and `potluck.deploy`. An experiment file comes in; results of cells are kept in a
folder.
"""
