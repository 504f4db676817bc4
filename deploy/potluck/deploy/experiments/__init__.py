"""Experiments: grids of settings × seeds, a federation for each cell, and what came of it."""
