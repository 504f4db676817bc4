"""The run file: its tables, its parser and its annotated example.

Takes an operator's TOML; gives checked settings to the code that plans a run. Imports `settings`
and the settings of other subpackages.
"""
