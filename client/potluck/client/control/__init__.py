"""The control stream of a host: connects to the coordinator, passes instructions to handlers.

Imports all other subpackages of the client. Instructions come in; acknowledgements, progress and
answers go out.
"""
