"""The commands of `potluck`, one module for each group.

Imports all other rooms; only `cli` imports it. Arguments come in from the command line; text, JSON
and exit codes go out.
"""
