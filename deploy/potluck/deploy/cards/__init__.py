"""Model cards: what a model comes from, for people and for programs.

Answers of the coordinator come in; a card goes out, and its files. Imports `operator` and `view`.
"""
