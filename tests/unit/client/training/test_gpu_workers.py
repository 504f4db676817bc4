"""Number of workers that share a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from potluck.client.training.kept_choices import keep_choice, read_choice
from potluck.client.training.processes.worker_count import (
    CONTEXT_BYTES,
    SHARE_OF_FREE,
    TrainingMemory,
    WorkerChoice,
    chosen_workers,
    memory_taken,
    workers_within,
)

GIB = 2**30


def memory(peak: float = 1.0, context: float = 0.5, free: float = 80.0) -> TrainingMemory:
    return TrainingMemory(peak=int(peak * GIB), context=int(context * GIB), free=int(free * GIB))


@pytest.mark.parametrize(
    ("taken", "lanes", "most", "expected"),
    [
        (memory(), 1, 16, 16),
        (memory(), 1, 64, 48),
        (memory(peak=30), 1, 16, 2),
        (memory(peak=50), 1, 16, 1),
        (memory(free=0), 1, 16, 1),
        (memory(peak=4), 16, 16, 16),  # 16 workers with one client each take 72
        # 8 workers with two clients each take 72; 16 with one take 80.
        (memory(peak=4, context=1), 16, 16, 8),
    ],
)
def test_number_of_workers_is_limited_by_free_memory(
    taken: TrainingMemory, lanes: int, most: int, expected: int
) -> None:
    assert workers_within(taken, lanes=lanes, most=most) == expected


sizes = st.integers(0, 100 * GIB)
counts = st.integers(1, 64)


@given(sizes, sizes, sizes, counts, counts)
def test_several_gpu_workers_always_fit_into_free_memory(
    peak: int, context: int, free: int, lanes: int, most: int
) -> None:
    def fits(workers: int) -> bool:
        clients = -(-lanes // workers)
        return workers * (context + clients * peak) <= SHARE_OF_FREE * free

    taken = TrainingMemory(peak=peak, context=context, free=free)
    found = workers_within(taken, lanes=lanes, most=most)
    assert 1 <= found <= most
    assert found == 1 or fits(found)
    assert not any(fits(more) for more in range(found + 1, most + 1))


@given(sizes, sizes, sizes, counts, counts, st.integers(0, 10 * GIB))
def test_more_free_memory_never_gives_fewer_gpu_workers(
    peak: int, context: int, free: int, lanes: int, most: int, more: int
) -> None:
    less, roomier = (
        TrainingMemory(peak=peak, context=context, free=each) for each in (free, free + more)
    )
    assert workers_within(less, lanes=lanes, most=most) <= workers_within(
        roomier, lanes=lanes, most=most
    )


def test_chosen_number_of_gpu_workers_has_a_reason(tmp_path: Path) -> None:
    choice = chosen_workers("it", memory(peak=2.5, free=20), lanes=4, most=8)
    assert choice.workers == 6  # six workers, one client each, take 18 GiB
    assert choice.reason == (
        "a client's training needs 2.50 GiB of GPU memory and its process another 0.50 GiB; "
        "20.00 GiB are free. At most 8 trainings of up to 4 clients run at once"
    )
    assert keep_choice(tmp_path, choice) == choice
    assert read_choice(tmp_path, WorkerChoice, "it") == choice
    assert read_choice(tmp_path, WorkerChoice, "another") is None
    unmeasured = chosen_workers("it", None, lanes=1, most=8)
    assert (unmeasured.workers, unmeasured.reason) == (
        1,
        "the memory of a training can't be measured",
    )


def test_training_memory_includes_peak_tensors_and_gpu_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Simulated GPU values: a peak of 3 GiB of tensors, 2 GiB of them still held, and 1 GiB of
    kernels."""
    free, held = iter([70 * GIB, 67 * GIB]), iter([0, 2 * GIB])
    cuda, done = torch.cuda, []
    monkeypatch.setattr(cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(cuda, "mem_get_info", lambda _: (next(free), 80 * GIB))
    monkeypatch.setattr(cuda, "memory_reserved", lambda _: next(held))
    monkeypatch.setattr(cuda, "reset_peak_memory_stats", lambda _: done.append("reset"))
    monkeypatch.setattr(cuda, "max_memory_reserved", lambda _: 3 * GIB)
    found = memory_taken(torch.device("cuda:0"), lambda: done.append("trained"))
    assert done == ["reset", "trained"]
    assert found.peak == 3 * GIB
    assert found.context == CONTEXT_BYTES + GIB
    assert found.free == 69 * GIB + found.context
