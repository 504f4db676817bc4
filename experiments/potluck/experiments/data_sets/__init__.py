"""Converts official downloads of data sets into the .npz files that tasks read.

Only formats that can't contain code are read: idx files, CIFAR's binary version, tables of numbers,
images. Imports `tasks`.
"""
