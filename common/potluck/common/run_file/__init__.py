"""The run file: its tables, its parser and its annotated example.

An operator's TOML comes in; checked settings go to the code that plans a run. Imports `settings`
and the settings of other subpackages.
"""
