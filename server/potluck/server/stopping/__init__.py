"""Rules that decide by a metric which model of a run is its best, and whether it ends early.

Takes a run file, returns a rule. The rule takes a round's metrics and returns the record to store
with the round. Pure. Imports `store` for its records, and strategies' declarations.
"""
