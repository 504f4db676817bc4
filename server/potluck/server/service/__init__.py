"""The coordinator as a server: the services that hosts and operators call.

Imports all other subpackages; none imports it. Every call passes `guard`.
"""
