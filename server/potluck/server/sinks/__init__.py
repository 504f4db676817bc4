"""Sinks record runs in trackers and files outside the database. Each sink has its own process.

Imports the store's tables and the extension point `sink`. Takes the `[sinks]` tables of the
configuration. The coordinator only starts the processes, notifies them of news, and reads their
reports. The processes read rows from the database and pass them to the sinks.
"""
