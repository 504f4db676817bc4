"""A federation on machines: the inventory, Docker engines over ssh, Slurm.

Imports `pki`. An inventory comes in; containers, files and jobs on machines come out.
"""
