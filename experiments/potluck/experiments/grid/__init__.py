"""Grids of settings × seeds: an experiment's file, its cells, and a federation for each of them.

Imports `presets` and `potluck.deploy`. Input: an experiment file. Output: results of cells, stored
in a folder.
"""
