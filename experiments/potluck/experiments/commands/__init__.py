"""The commands `potluck data`, `experiment`, `preset` and `pretrained`.

Imports all other rooms. `potluck` finds them by their entry points in the group
`potluck.commands`.
"""
