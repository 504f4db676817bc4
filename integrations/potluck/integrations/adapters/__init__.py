"""Trainers for code that exists, and tasks of a script's functions.

For PyTorch loops, transformers, Lightning and MONAI; and low-rank adapters around a model. A module
is imported by whoever uses its library. Imports the modules at the root, and `settings`. A script's
own functions come in; a `Trainer` goes out, which reports progress, can be cancelled, draws from
the seed that it is given, and writes nothing into the working directory.
"""
