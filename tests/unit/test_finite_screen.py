"""What a look at arriving bytes says of the numbers in them: never 'clean' of what is not."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from potluck.common.finite_screen import FiniteScreen
from potluck.common.runfile import Direction
from potluck.common.tensors import open_tensors, write_tensors
from potluck.server.update_files import UpdateFiles

NUMBERS = st.floats(width=32, allow_nan=True, allow_infinity=True)


def seen(content: bytes, cuts: list[int]) -> bool:
    screen, begin = FiniteScreen(), 0
    for cut in [*sorted(cuts), len(content)]:
        if cut > begin:
            screen.see(memoryview(content)[begin:cut])
            begin = cut
    return screen.clean


@given(st.lists(NUMBERS, max_size=40), st.lists(st.integers(0, 160), max_size=5), st.booleans())
def test_clean_means_that_every_word_is_finite(
    numbers: list[float], cuts: list[int], whole_words: bool
) -> None:
    content = np.array(numbers, np.float32).tobytes()
    if whole_words:
        cuts = [cut - cut % 4 for cut in cuts]
    clean = seen(content, [min(cut, len(content)) for cut in cuts])
    finite = all(map(math.isfinite, numbers))
    assert not clean or finite
    if whole_words:
        assert clean == finite


def test_large_numbers_whose_sum_overflows_are_clean() -> None:
    assert seen(np.full(1000, 3e38, np.float32).tobytes(), [])


def test_integers_that_look_like_nan_only_cost_another_look(tmp_path: Path) -> None:
    arrays: dict[str, NDArray[np.generic]] = {
        "steps": np.array([-1], np.int64),
        "weights": np.ones(5, np.float32),
    }
    path = tmp_path / "update"
    write_tensors(path, arrays)
    with open_tensors(path) as file:
        layout = file.layout
    clean = seen(path.read_bytes(), [])
    assert not clean
    UpdateFiles(layout, Direction(), ()).check(path, None, compressed=False, finite=clean)
