"""Runs cells on the machines of a Ray cluster: their resources, their data, and the actors.

Imports `grid`. Actors receive cells and return reports. No other part of Potluck imports Ray.
"""
