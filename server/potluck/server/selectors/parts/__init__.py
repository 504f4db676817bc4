"""Formulas and states that several selectors share; pure functions.

Imports the extension point for selectors. Takes rows of clients and a generator, returns rows.
"""
