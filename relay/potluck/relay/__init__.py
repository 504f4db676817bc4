"""A relay: the coordinator of the hosts behind it, and a host among many to its coordinator.

It takes the calls that hosts make, with the guards of `potluck.server`, and makes them again with
the links of `potluck.client`; so it may import both, and neither imports it. Control streams go
through one by one; files are kept here, verified, on their way down and up.
"""
