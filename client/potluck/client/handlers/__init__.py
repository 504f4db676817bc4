"""What a host is asked to do: one handler for each kind of instruction, and their log.

An instruction comes in from the inbox with the context that all handlers share. A handler asks the
owner's policy, has the device compute, and gives back an answer, or delivers an update. Imports
`base`, `disclosure`, `masking`, `training` and `transfer`.
"""
