"""Rules for a run's best model and its early end, by a metric.

Takes a run file, returns a rule. The rule takes a round's metrics and returns the record to store
with it. Pure. Imports `store` for its records, and strategies' declarations.
"""
