"""What selectors are made of: formulas and state that several of them share. Pure.

Imports the seam for selectors. Rows of clients and a generator come in, rows come out.
"""
