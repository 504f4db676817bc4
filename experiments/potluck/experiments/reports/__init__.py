"""Reports on experiments and data: tables, tests, plots, a web page, descriptions of partitions.

Imports `grid` and `potluck.deploy.view`. Results come in; text, tables and pictures go out.
"""
