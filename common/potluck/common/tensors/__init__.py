"""Tensors as files: layout, encodings, compression, digests, vectors over many tensors.

Imports the modules at the root. Arrays and bytes go in and come out; nothing here knows of
clients, rounds or gRPC.
"""
