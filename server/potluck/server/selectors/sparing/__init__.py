"""Selectors that let clients skip their upload, from their answers about the trained models.

Imports the extension point for selectors and their shared parts. Takes clients' offers, returns
cohorts and the clients that skip their upload.
"""
