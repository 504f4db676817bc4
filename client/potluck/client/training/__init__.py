"""Training and evaluation on this host's device, with the files that they read and write.

Input: a model file and settings. Output: an update file and its report. Blocking: runs in the
worker's threads. Imports the extension points, `base`, `disclosure` and `potluck.common`.
"""
