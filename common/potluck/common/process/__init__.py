"""Parts of every program's process: start, logs, folder lock, memory and end.

Imports the modules at the root and `net.protocol`. Takes signals and arguments; returns log lines
and exit codes.
"""
