"""Settings and plug-ins: TOML is read into frozen models, plug-ins are found by name.

Imports the modules at the root. Takes text; returns checked values, or raises one error that names
the cause.
"""
