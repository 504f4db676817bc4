"""The coordinator as a server: the gRPC services that hosts and operators call.

Imports all other subpackages; none of them imports this one. Every call passes `guard`.
"""
