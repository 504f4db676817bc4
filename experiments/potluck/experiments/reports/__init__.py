"""Reports on experiments and data: tables, tests, plots, a web page, descriptions of partitions.

Imports `grid` and `potluck.deploy.view`. Input: results. Output: text, tables and pictures.
"""
