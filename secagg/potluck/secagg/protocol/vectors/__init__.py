"""Inputs as vectors of words that can be summed: counts, model updates, noise.

It imports the wire's messages, which describe the lanes of a vector. Arrays and a session's header
come in, words go out; and back, from the sum's words to numbers.
"""
