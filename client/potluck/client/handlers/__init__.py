"""The instructions of a host: one handler for each kind, and the instruction log.

The inbox passes a handler an instruction and the context that all handlers share. A handler checks
the owner's policy, has the device compute, and returns an answer or delivers an update. Imports
`base`, `disclosure`, `training` and `transfer`.
"""
