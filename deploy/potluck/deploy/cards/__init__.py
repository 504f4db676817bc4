"""Model cards: the origin of a model, as Markdown for people and JSON for programs.

Input: answers of the coordinator. Output: a card, and its files. Imports `operator` and `view`.
"""
