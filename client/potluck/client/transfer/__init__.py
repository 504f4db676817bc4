"""Files between a host and the coordinator: the link, downloads, uploads, and stored files.

Imports `base`, the encodings of `training` and `potluck.common`. Downloads take a digest and return
a verified file. Uploads are tried again until the coordinator has the update.
"""
