"""How many processes train side by side where nobody says."""

from __future__ import annotations

import pytest

from potluck.client.training.processes.worker_count import BYTES_PER_WORKER, automatic


@pytest.mark.parametrize(
    ("clients", "threads", "processors", "memory", "expected"),
    [
        (100, 1, 8, 64, 8),
        (100, 4, 8, 64, 2),
        (3, 1, 8, 64, 3),
        (100, 1, 8, 2, 2),
        (1, 1, 1, 0, 1),
        (100, 16, 8, 64, 1),
    ],
)
def test_workers_fill_processors_find_clients_and_have_memory(
    clients: int, threads: int, processors: int, memory: int, expected: int
) -> None:
    found = automatic(clients, threads, processors=processors, memory=memory * BYTES_PER_WORKER)
    assert found == expected
