"""Training and evaluation on this host's device, and the files that go in and come out.

Imports the seams, `base`, `disclosure` and `potluck.common`. A model file and settings come in;
an update file and its report come out. Blocking: runs in the worker's threads.
"""
