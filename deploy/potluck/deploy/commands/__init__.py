"""The commands of `potluck`, one module for each group.

Imports all other subpackages; only `cli` imports it. Input: command-line arguments. Output: text,
JSON and exit codes.
"""
