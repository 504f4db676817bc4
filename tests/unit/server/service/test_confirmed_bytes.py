"""Downloaded bytes count once hosts have received them, not when gRPC accepts them."""

from __future__ import annotations

from potluck.server.service.transfers import ConfirmedBytes

HOST, FILE, SIZE = "host-0", "0" * 64, 10_000


def fetched(counts: ConfirmedBytes, offset: int, handed: int, *, whole: bool = False) -> int:
    """Make one download call; return the number of bytes that it confirms."""
    download, confirmed = counts.asked(HOST, FILE, offset)
    download.hand(handed)
    return confirmed + (download.complete(SIZE) if whole else 0)


def test_completed_download_counts_its_bytes() -> None:
    assert fetched(ConfirmedBytes(), 0, SIZE, whole=True) == SIZE


def test_interrupted_downloads_count_the_bytes_that_the_host_confirms() -> None:
    counts = ConfirmedBytes()
    counted = [
        fetched(counts, 0, 8000),
        fetched(counts, 1000, 8000),
        fetched(counts, 1500, 8500),
        fetched(counts, 4000, 6000, whole=True),
    ]
    assert counted == [0, 1000, 500, 2500 + 6000]


def test_interrupted_download_that_is_never_resumed_counts_no_bytes() -> None:
    assert fetched(ConfirmedBytes(), 0, 8000) == 0


def test_end_of_a_file_that_is_sent_twice_counts_once() -> None:
    counts = ConfirmedBytes()
    assert fetched(counts, 0, SIZE, whole=True) == SIZE
    assert fetched(counts, 7000, 3000, whole=True) == 0


def test_host_can_not_confirm_more_bytes_than_were_sent() -> None:
    counts = ConfirmedBytes()
    assert fetched(counts, 0, 2000) == 0
    assert fetched(counts, 9000, 1000, whole=True) == 2000 + 1000


def test_file_downloaded_again_from_its_start_counts_again() -> None:
    counts = ConfirmedBytes()
    assert fetched(counts, 0, SIZE, whole=True) == SIZE
    assert fetched(counts, 0, SIZE, whole=True) == SIZE


def test_confirmed_bytes_are_counted_per_host() -> None:
    counts = ConfirmedBytes()
    counts.asked("host-1", FILE, 0)[0].hand(8000)
    assert fetched(counts, 5000, 5000, whole=True) == 5000
