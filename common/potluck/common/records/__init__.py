"""The record of a committed round, in the one form that all programs use.

Imports `learning`, and the generated messages. The store and the messages are converted into these
records; displays, JSON, tables, cards and experiments read them.
"""
