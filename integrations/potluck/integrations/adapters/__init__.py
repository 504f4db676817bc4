"""Trainers for existing training code, and tasks made of a script's functions.

They support PyTorch loops, transformers, Lightning and MONAI, and low-rank adapters around a model.
Import only the module whose library you use. An adapter takes a script's own functions and makes a
`Trainer`. This trainer reports progress, can be cancelled, uses the given seed, and writes nothing
into the working directory.
"""
