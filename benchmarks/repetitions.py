"""Times work by the fastest of several repetitions."""

from __future__ import annotations

import time
from collections.abc import Callable


def fastest(work: Callable[[], object], repeats: int) -> float:
    """Return the processor seconds of the fastest of several repetitions."""
    seconds = []
    for _ in range(repeats):
        begun = time.process_time()
        work()
        seconds.append(time.process_time() - begun)
    return min(seconds)
