"""One run as a pure state machine, and the plan it follows.

Imports the seams and the store's records; no clock, network or disk. Events come in, actions come
out: `potluck.server.runs` turns what happens into events and carries the actions out.
"""
