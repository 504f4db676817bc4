"""The record of a committed round, in the one form that all programs use.

Imports `learning`, and the generated messages. Rows of the store and messages are converted into
these records. Displays, JSON, tables, model cards and experiments read them.
"""
