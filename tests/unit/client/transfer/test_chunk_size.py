"""Effect of interrupted connections on the chunk size."""

from __future__ import annotations

import pytest

from potluck.client.transfer.link import ChunkSize
from potluck.common.net.protocol import CHUNK_BYTES, LEAST_CHUNK_BYTES

KIB = 1 << 10


@pytest.mark.parametrize(
    ("size", "gained", "after"),
    [
        (1024, 0, 512),
        (512, 7 * 512, 256),  # too few chunks arrived: an eighth of the bytes or more is lost
        (512, 8 * 512, 512),
        (512, 63 * 512, 512),
        (512, 64 * 512, 1024),
        (16, 0, 16),
        (1024, 64 * 1024, 1024),
    ],
)
def test_interrupted_transfer_adapts_the_chunk_size_to_the_received_bytes(
    size: int, gained: int, after: int
) -> None:
    chunks = ChunkSize(size * KIB)
    chunks.broke(gained * KIB)
    assert chunks.bytes == after * KIB


@pytest.mark.parametrize("carries", [20_000, 100_000, 700_000, 3_000_000])
def test_file_passes_any_link_that_carries_the_minimum_chunk(carries: int) -> None:
    chunks, held, breaks = ChunkSize(), 0, 0
    while held < 50 << 20:
        gained = carries // chunks.bytes * chunks.bytes
        held += gained
        chunks.broke(gained)
        breaks += 1
    assert LEAST_CHUNK_BYTES <= chunks.bytes <= CHUNK_BYTES
    assert held / breaks > carries * 0.75


def test_complete_transfers_increase_the_chunk_size_again() -> None:
    chunks = ChunkSize(LEAST_CHUNK_BYTES)
    for _ in range(6):
        chunks.passed()
    assert chunks.bytes == CHUNK_BYTES
    chunks.passed()
    assert chunks.bytes == CHUNK_BYTES
