"""Output for people: tables, live views, reports and plots.

Imports `operator`. Values come in; text and pictures go out.
"""
