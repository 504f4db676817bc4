"""Official downloads of data sets, turned into the .npz files that tasks read.

Only formats that can't carry code are read: idx files, CIFAR's binary version, tables of numbers,
images. Imports `tasks`.
"""
