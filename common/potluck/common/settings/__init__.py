"""Settings and plug-ins: TOML read into frozen models, plug-ins found by name.

Imports the modules at the root. Text comes in; checked values come out, or one error that names
the cause.
"""
