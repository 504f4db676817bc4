"""Inputs as vectors of words that can be summed: counts, model updates, noise.

It encodes arrays as words, by a session's header, and decodes a sum's words to numbers. It imports
the messages of `wire`, which describe the vectors.
"""
