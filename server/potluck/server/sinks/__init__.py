"""Sinks: runs recorded in trackers and files beside the database, by a process for each sink.

Imports the store's tables and the extension point `sink`. In come `[sinks]` tables of the
configuration and, in the other process, rows that are read from the database; what sinks record
goes out. The coordinator only starts the processes, notifies them of news, and reads their reports.
"""
