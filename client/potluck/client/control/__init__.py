"""The control stream of a host: what it is asked to do, how far each instruction has come.

Imports all other rooms of the client. Instructions come in, acknowledgements, progress and answers
go out.
"""
