"""Tables: the columns of a run's rounds, and files of CSV and Parquet.

Imports `potluck.common.errors` and `learning`. Rows of plain values come in; files come out.
"""
