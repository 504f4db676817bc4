"""The part of updates that coordinator and hosts share.

It defines the client's report, the settings that all clients of a masked round must have in common,
and fixed point, in which updates are added exactly.

To have clients report another number, add it to `update_report.py`. Imports `learning`, `settings`
and `tensors`.
"""
