"""The size of pieces follows the rate of a link."""

from __future__ import annotations

import pytest

from potluck.client.transfer.link import LEAST_PIECE_BYTES, PieceSize

PING_SECONDS = 8.0
"""Seconds that gRPC waits for the answer to a ping."""


def sent_over(bytes_per_second: float, pieces: PieceSize, count: int = 20) -> list[float]:
    """Send pieces over a link of this rate; return the seconds that each takes."""
    took = []
    for _ in range(count):
        took.append(pieces.bytes / bytes_per_second)
        pieces.confirmed(pieces.bytes, took[-1])
    return took


@pytest.mark.parametrize("rate", [10e3, 15e3, 100e3, 0.5 * 2**20, 10e6])
def test_pieces_on_a_link_of_any_rate_arrive_within_the_ping_timeout(rate: float) -> None:
    took = sent_over(rate, PieceSize())
    assert max(took) < PING_SECONDS
    assert took[-1] == pytest.approx(3.0, abs=0.01)


@pytest.mark.parametrize(("hosts", "rate"), [(7, 7.5e3), (14, 15e3)])
def test_pieces_of_hosts_that_share_a_link_arrive_within_the_ping_timeout(
    hosts: int, rate: float
) -> None:
    pieces = [PieceSize() for _ in range(hosts)]
    for _ in range(20):
        waiting = sum(each.bytes for each in pieces)  # all wait in one queue before the line
        assert waiting / rate < PING_SECONDS
        for each in pieces:
            each.confirmed(each.bytes, waiting / rate)


def test_a_fast_link_carries_a_file_in_few_pieces() -> None:
    pieces, sent, count = PieceSize(), 0, 0
    while sent < 100_000_000:
        sent += pieces.bytes
        pieces.confirmed(pieces.bytes, 0.005 + pieces.bytes / 200e6)
        count += 1
    assert count <= 9


def test_piece_confirmed_at_once_makes_the_next_one_four_times_larger() -> None:
    pieces = PieceSize()
    before = pieces.bytes
    pieces.confirmed(before, 0.0)
    assert pieces.bytes == 4 * before


def test_interrupted_slow_link_reduces_the_piece_size_to_its_rate() -> None:
    pieces = PieceSize(100_000_000)
    pieces.broke(gained=400_000, seconds=30.0)
    assert pieces.bytes == 40_000
    pieces.broke(gained=0, seconds=30.0)
    assert pieces.bytes == LEAST_PIECE_BYTES


def test_interrupted_fast_link_halves_the_piece_size() -> None:
    pieces = PieceSize(8_000_000)
    pieces.broke(gained=700_000, seconds=0.01)
    assert pieces.bytes == 4_000_000
