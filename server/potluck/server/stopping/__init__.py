"""The measure by which a run goes: its best model, and whether it has been trained long enough.

A run file comes in and a rule goes out; rounds and their measures come in, and what is stored with
each of them goes out. Pure. Imports `store` for its records, and strategies' declarations.
"""
