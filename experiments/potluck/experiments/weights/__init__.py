"""Weights trained elsewhere, made to fit a model.

Imports `potluck.common` only. Files of weights come in; arrays go out.
"""
