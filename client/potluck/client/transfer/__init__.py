"""Files between a host and the coordinator: the link, downloads, uploads, and files kept for them.

Imports `base`, the encodings of `training` and `potluck.common`. Given a digest, it returns a
verified file. It uploads updates until the coordinator has them.
"""
