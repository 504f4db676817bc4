"""Output for people: tables, live views, reports and plots.

Imports `operator`. Input: values. Output: text and pictures.
"""
