"""The commands `potluck data`, `experiment`, `preset`, `pretrained` and `traces`.

Imports all other subpackages. `potluck` finds the commands by their entry points in the group
`potluck.commands`.
"""
