"""The run file: its tables, its parser and its annotated example.

TOML comes in from an operator, checked settings go to whoever plans a run. Imports `settings` and
the settings of other rooms.
"""
