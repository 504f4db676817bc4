"""A relay: acts as coordinator for the hosts behind it, and as a host for its own coordinator.

It receives the hosts' calls with the guards of `potluck.server`, and calls the coordinator with the
links of `potluck.client`. So it may import both packages; neither imports it. Each host's control
stream is forwarded as a separate stream. The relay verifies and stores files in both directions.
"""
