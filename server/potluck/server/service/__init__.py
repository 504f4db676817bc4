"""The coordinator as a whole, on a port: what hosts and operators call.

Imports all other rooms; none imports it. Every call comes in through `guard`.
"""
