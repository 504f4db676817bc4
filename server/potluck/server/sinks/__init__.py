"""Sinks: runs recorded in trackers and files beside the database, by a process for each sink.

Imports the store's tables and the seam `sink`. In come `[sinks]` tables of the configuration and,
in the other process, rows that are read from the database; what sinks do with them goes out. The
coordinator only starts the processes, tells them that there is news, and hears how they do.
"""
