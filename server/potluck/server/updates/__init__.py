"""Receives a round's updates: the inbox, the checks of reports, and the paths *open* and *summed*.

Imports `live`, `reduce` and the state machine. Takes headers and files of uploads; posts their
arrival to the state machine, and has the round's model made of them.
"""
