"""Tensors in files: layout, encodings, compression, digests, vectors over many tensors.

Imports the modules at the root. Takes and returns arrays and bytes; nothing here depends on
clients, rounds or gRPC.
"""
