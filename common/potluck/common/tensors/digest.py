"""The digest that identifies a file: BLAKE3 of its bytes, 64 lower-case hexadecimal digits.

BLAKE3 and not SHA-256, because each byte of a round is hashed three times: by its writer, on a host
and on the coordinator. SHA-256 took a third of a round's processor time (docs/contributing/adr).
"""

from __future__ import annotations

from pathlib import Path

from blake3 import blake3

from potluck.common.interruptible import interruption

_PIECE_BYTES = 1 << 20


def hasher() -> blake3:
    """Return a hash object to feed with `update`. It is single-threaded and releases the
    interpreter's lock."""
    return blake3()


def digest_of(content: bytes | memoryview) -> str:
    """Return the digest of some bytes."""
    return blake3(content).hexdigest()


def digest_of_file(path: Path) -> tuple[str, int]:
    """Return digest and length of a file. Raises OSError."""
    digest, size, check = blake3(), 0, interruption()
    buffer = bytearray(_PIECE_BYTES)
    with path.open("rb", buffering=0) as file:
        while length := file.readinto(buffer):
            check()
            digest.update(memoryview(buffer)[:length])
            size += length
    return digest.hexdigest(), size
