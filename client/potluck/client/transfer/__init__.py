"""Files between a host and the coordinator: the link, downloads, uploads, what is kept meanwhile.

Imports `base`, the encodings of `training` and `potluck.common`. Digests come in; verified files
come out, and updates go up until they are received.
"""
