"""Selectors that let some clients skip their upload, based on answers about the trained models.

Imports the extension point for selectors and their shared parts. Takes clients' offers, returns
cohorts and the clients that skip their upload.
"""
