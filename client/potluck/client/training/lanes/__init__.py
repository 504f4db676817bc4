"""Training of several clients of a host in one batched step; each client has its own lane."""
