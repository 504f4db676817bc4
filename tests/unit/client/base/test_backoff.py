from __future__ import annotations

import random

import pytest

from potluck.client.base.backoff import Backoff, backoff_seconds


@pytest.mark.parametrize(
    ("attempt", "jitter", "seconds"),
    [
        (0, 0.0, 0.1),
        (1, 0.0, 0.2),
        (3, 0.0, 0.8),
        (3, 0.5, 0.6),
        (6, 0.0, 5.0),  # 6.4 is above the maximum
        (6, 1.0, 2.5),
        (100_000, 0.0, 5.0),
    ],
)
def test_backoff_pause_doubles_up_to_the_maximum(
    attempt: int, jitter: float, seconds: float
) -> None:
    assert backoff_seconds(attempt, first=0.1, maximum=5.0, jitter=jitter) == pytest.approx(seconds)


def test_backoff_pauses_grow_and_restart_after_a_reset() -> None:
    backoff = Backoff(random.Random(1), maximum=5.0)
    pauses = [backoff.next_seconds() for _ in range(12)]
    for attempt, pause in enumerate(pauses):
        whole = min(5.0, 0.1 * 2**attempt)
        assert whole / 2 < pause <= whole
    backoff.reset()
    assert backoff.next_seconds() <= 0.1


def test_two_hosts_have_different_backoff_pauses() -> None:
    one, other = (Backoff(random.Random(seed)) for seed in (1, 2))
    assert one.next_seconds() != other.next_seconds()
