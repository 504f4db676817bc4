"""Malformed disclosures of hostile clients are refused."""

from __future__ import annotations

import numpy as np
import pytest

from potluck.common.disclosure import Mode, Parameters, TaskReference
from potluck.common.errors import ProtocolError
from potluck.common.signal import read_payload

EXACT = Parameters(mode=Mode.EXACT, task=TaskReference(name="t"))
NOISY = Parameters(mode=Mode.NOISY, task=TaskReference(name="t"), epsilon=1, adjacency="replace")


@pytest.mark.parametrize(
    ("signal", "text", "expected"),
    [
        ("label_counts", '{"label_counts": [1, 0, 7]}', [1, 0, 7]),
        ("triplet", '{"triplet": [0, 1, 0.25], "degenerate": false}', [0, 1, 0.25]),
        ("triplet", '{"triplet": [0, 0, 0], "degenerate": null}', [0, 0, 0]),
        (
            "interaction_matrix",
            '{"interaction_matrix": [[1, 2], [3, 4], [0, 0]]}',
            [[1, 2], [3, 4], [0, 0]],
        ),
    ],
)
def test_valid_disclosure_payload_is_read(signal: str, text: str, expected: object) -> None:
    np.testing.assert_array_equal(read_payload(signal, EXACT, text, classes=3), expected)


def test_noisy_counts_may_be_negative() -> None:
    counts = read_payload("label_counts", NOISY, '{"label_counts": [-3, 0, 7]}', classes=3)
    np.testing.assert_array_equal(counts, [-3, 0, 7])


@pytest.mark.parametrize(
    ("signal", "text"),
    [
        ("label_counts", '{"label_counts": [1, -1, 7]}'),
        ("label_counts", '{"label_counts": [1, 2]}'),
        ("label_counts", '{"label_counts": [1, 2, 3, 4]}'),
        ("label_counts", '{"label_counts": [1, NaN, 3]}'),
        ("label_counts", '{"label_counts": [1, Infinity, 3]}'),
        ("label_counts", '{"label_counts": [1, 1e400, 3]}'),
        ("label_counts", '{"label_counts": [1, 2.5, 3]}'),
        ("label_counts", '{"label_counts": [1, "2", 3]}'),
        ("label_counts", '{"label_counts": [1, true, 3]}'),
        ("label_counts", '{"label_counts": [1, 99999999999999999999, 3]}'),
        ("label_counts", '{"label_counts": 3}'),
        ("label_counts", '{"triplet": [0, 0, 0]}'),
        ("label_counts", '{"label_counts": [1, 2, 3], "more": 1}'),
        ("label_counts", "[[[["),
        ("label_counts", ""),
        ("label_counts", " " * ((1 << 20) + 1)),
        ("triplet", '{"triplet": [0, 0, 1.0000001]}'),
        ("triplet", '{"triplet": [0, -0.1, 1]}'),
        ("triplet", '{"triplet": [0, NaN, 1]}'),
        ("triplet", '{"triplet": [0, 1]}'),
        ("interaction_matrix", '{"interaction_matrix": [[1, 2], [3, 4]]}'),
        ("interaction_matrix", '{"interaction_matrix": [[1, 2], [3, 4], [5]]}'),
        ("interaction_matrix", '{"interaction_matrix": [[1, 2], [3, 4], [5, -6]]}'),
        ("salaries", "{}"),
    ],
)
def test_malformed_disclosure_payload_is_refused_in_one_line(signal: str, text: str) -> None:
    with pytest.raises(ProtocolError) as refusal:
        read_payload(signal, EXACT, text, classes=3)
    assert "\n" not in refusal.value.message
