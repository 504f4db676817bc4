"""Tables: the columns of a run's rounds, and files in CSV and Parquet format.

Imports `potluck.common.errors` and `learning`. Takes rows of plain values; writes files.
"""
