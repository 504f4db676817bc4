"""The shared side of an update: the client's report, what all clients of a
masked round compute alike, and lanes, in which updates are added exactly.

A number that clients report is added to `update_report.py`. Imports `learning`, `settings` and
`tensors`.
"""
