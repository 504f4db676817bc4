"""Screening of arriving bytes: bytes with unusable numbers are never reported as clean."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from potluck.common.errors import OutOfBoundsError
from potluck.common.run_file.run_settings import DirectionSettings
from potluck.common.tensors.finite_screen import FiniteScreen
from potluck.common.tensors.tensor_files import LARGEST_VALUE, open_tensors, write_tensors
from potluck.server.reduce.update_files import UpdateFiles

NUMBERS = st.floats(width=32, allow_nan=True, allow_infinity=True)


def seen(content: bytes, cuts: list[int], header: bytes = b"") -> bool:
    """Screen a file with this content after its header, cut at these places; return `clean`."""
    content = len(header).to_bytes(8, "little") + header + content
    cuts = [8 + len(header) + cut for cut in cuts]
    screen, begin = FiniteScreen(), 0
    for cut in [*sorted(cuts), len(content)]:
        if cut > begin:
            screen.see(memoryview(content)[begin:cut])
            begin = cut
    return screen.clean


@given(st.lists(NUMBERS, max_size=40), st.lists(st.integers(0, 160), max_size=5), st.booleans())
def test_screened_bytes_are_clean_only_if_every_number_is_within_bounds(
    numbers: list[float], cuts: list[int], whole_words: bool
) -> None:
    content = np.array(numbers, np.float32).tobytes()
    if whole_words:
        cuts = [cut - cut % 4 for cut in cuts]
    clean = seen(content, [min(cut, len(content)) for cut in cuts])
    fit = all(abs(number) < LARGEST_VALUE for number in numbers)
    assert not clean or fit
    if whole_words:
        assert clean == fit


def test_header_bytes_are_not_screened_as_numbers() -> None:
    numbers = np.ones(9, np.float32).tobytes()
    assert seen(numbers, [], header=b"zzzz" * 100)
    assert seen(numbers, [4], header=b"zzzz" * 100)
    assert not seen(numbers, [], header=b"zzz")  # not aligned to four bytes


def test_numbers_beyond_the_largest_value_are_not_clean(tmp_path: Path) -> None:
    below = np.nextafter(np.float32(LARGEST_VALUE), np.float32(0))
    assert seen(np.full(1000, below).tobytes(), [])
    assert np.isfinite(np.square(below))
    for number in (LARGEST_VALUE, -LARGEST_VALUE, 3e38):
        path = tmp_path / "update"
        write_tensors(path, {"weights": np.array([0, number, 0], np.float32)})
        clean = seen_file(path)
        assert not clean
        with open_tensors(path) as file:
            layout = file.layout
        with pytest.raises(OutOfBoundsError, match=r"tensor 'weights' holds -?[0-9.]*e"):
            UpdateFiles(layout, DirectionSettings(), ()).check(
                path, None, compressed=False, finite=clean
            )


def seen_file(path: Path) -> bool:
    screen = FiniteScreen()
    screen.see(path.read_bytes())
    return screen.clean


def test_integers_that_look_like_nan_are_accepted_by_the_full_check(tmp_path: Path) -> None:
    arrays: dict[str, NDArray[np.generic]] = {
        "steps": np.array([-1], np.int64),
        "weights": np.ones(5, np.float32),
    }
    path = tmp_path / "update"
    write_tensors(path, arrays)
    with open_tensors(path) as file:
        layout = file.layout
    clean = seen_file(path)
    assert not clean
    UpdateFiles(layout, DirectionSettings(), ()).check(path, None, compressed=False, finite=clean)
