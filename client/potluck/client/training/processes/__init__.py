"""Processes of this host that train several clients on one device at the same time.

`device_process` is the host's side, `training_worker` the worker's. They exchange pickled jobs and
results. Pickle is safe here: both sides belong to this host, and the messages contain data from the
network only as bytes.
"""
