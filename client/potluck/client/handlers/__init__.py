"""What a host is asked to do: one handler for each kind of instruction, and their log.

The inbox passes a handler an instruction and the context that all handlers share. A handler checks
the owner's policy, has the device compute, and returns an answer or delivers an update. Imports
`base`, `disclosure`, `masking`, `training` and `transfer`.
"""
