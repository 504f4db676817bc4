"""A federation on machines: the inventory, Docker engines over ssh, Slurm.

Imports `pki`. Input: an inventory. Output: containers, files and jobs on machines.
"""
