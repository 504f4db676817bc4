"""A relay: the coordinator of the hosts behind it, and a host among many to its coordinator.

It receives the hosts' calls with the guards of `potluck.server`, and calls the coordinator with the
links of `potluck.client`; so it may import both, and neither imports it. Each control stream is
passed on by itself. Files are verified and stored here in both directions.
"""
