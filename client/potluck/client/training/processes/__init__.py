"""Processes of this host that train side by side, where one device is to train several clients.

`device_process` is this side, `training_worker` the other. Between them go jobs and results,
pickled: both ends are this host's own, and nothing that came over the network is in them but as
bytes.
"""
