"""What people see of experiments and data: tables, tests, plots, a page, a partition described.

Imports `grid` and `potluck.deploy.view`. Results come in; text, tables and pictures go out.
"""
