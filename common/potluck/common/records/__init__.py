"""The record of a committed round: the one form that all programs use.

Imports `learning`, and the stubs for the form on the wire. The store and the wire turn theirs into
these records; displays, JSON, tables, cards and experiments read them.
"""
