"""A relay: the coordinator of the hosts behind it, and a host among many to its coordinator.

It receives the hosts' calls with the guards of `potluck.server`, and calls the coordinator with the
links of `potluck.client`. So it may import both packages; neither imports it. Each host's control
stream is forwarded as a separate stream. Files are verified and stored here in both directions.
"""
