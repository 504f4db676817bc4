"""Adapts weights of other trainings to a model.

Imports `potluck.common` only. Input: files of weights. Output: arrays.
"""
