"""The data sets of papers as tasks, and the ways in which papers split them over clients.

Imports `potluck.common` only: hosts and coordinators load these tasks. Input: files of a data
directory. Output: samples.
"""
