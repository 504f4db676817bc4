"""What every program of Potluck does as a process: it begins, logs, locks its folder, ends.

Imports the modules at the root and `net.protocol`. Signals and arguments come in; log lines and
exit codes go out.
"""
