"""Formulas and state that several selectors share. Pure.

Imports the seam for selectors. Rows of clients and a generator come in, rows come out.
"""
