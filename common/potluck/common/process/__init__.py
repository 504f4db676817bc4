"""The process of every program: its start, logs, folder lock, memory and end.

Imports the modules at the root and `net.protocol`. Signals and arguments come in; log lines and
exit codes go out.
"""
