"""The shared side of an update: the client's report, its masked form, what all
clients of a masked round compute alike, and lanes, in which updates are added exactly.

A number that clients report is added to `update_report.py`. Imports `learning`, `secagg`,
`settings` and `tensors`.
"""
