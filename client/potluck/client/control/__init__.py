"""The control stream of a host: it attends the coordinator, and hands instructions to handlers.

Imports all other rooms of the client. Instructions come in; acknowledgements, progress and answers
go out.
"""
