"""Processes of this host that train side by side, where one device is to train several clients.

`device_process` is the host's side, `training_worker` the worker's. They exchange pickled jobs and
results. Both ends belong to this host, and data from the network is in the messages only as bytes.
"""
