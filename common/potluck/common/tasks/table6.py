"""The client partitions of Table 6 in the FedDiverse paper, as interaction matrices.

Rows are classes, columns the two attributes. A test checks the paper's metrics. If each client has
only one type of imbalance, clients are in the order CI, AI, SC. The paper does not specify the
order of clients or the names of classes and attributes. For `spawrious-4`, it also does not specify
which two classes a class-imbalanced client has more of; here these are the first two or the last
two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from potluck.common.errors import ConfigurationError

Matrix = tuple[tuple[int, int], ...]


def _by_class(many: int, few: int) -> Matrix:
    return ((many, many), (few, few))


def _by_attribute(many: int, few: int) -> Matrix:
    return ((many, few), (many, few))


def _correlated(many: int, few: int) -> Matrix:
    return ((many, few), (few, many))


def _flip_classes(matrix: Matrix) -> Matrix:
    return matrix[::-1]


def _flip_attributes(matrix: Matrix) -> Matrix:
    return tuple((second, first) for first, second in matrix)


def _twice(matrix: Matrix) -> Matrix:
    """Expand a two-class matrix to four classes: each row is repeated for a second class."""
    return tuple(row for row in matrix for _ in range(2))


def _pure(many: int, few: int, shares: tuple[tuple[int, int], ...]) -> list[tuple[int, Matrix]]:
    """Return clients that each have one type of imbalance: CI, AI or SC.

    shares: for each type, the number of clients with the type's matrix, and with the flipped
    matrix.
    """
    matrices = (_by_class(many, few), _by_attribute(many, few), _correlated(many, few))
    flips = (_flip_classes, _flip_attributes, _flip_classes)
    return [
        (clients, matrix)
        for original, flip, (straight, flipped) in zip(matrices, flips, shares, strict=True)
        for clients, matrix in ((straight, original), (flipped, flip(original)))
    ]


_CORRELATED = _pure(90, 10, ((2, 2), (2, 2), (15, 1)))

_PARTITIONS: Mapping[str, Iterable[tuple[int, Matrix]]] = MappingProxyType(
    {
        "spawrious-gsc": _CORRELATED,
        "cmnist-gsc": _CORRELATED,
        "spawrious-gci": _pure(90, 10, ((15, 1), (2, 2), (2, 2))),
        "spawrious-gai": [
            (1, ((20, 10), (120, 5))),
            (1, ((5, 10), (120, 40))),
            (2, ((5, 5), (170, 5))),
            (2, ((170, 5), (5, 5))),
            (2, ((120, 10), (10, 30))),
            (2, ((20, 2), (80, 80))),
            (14, ((90, 2), (80, 15))),
            (1, ((85, 8), (110, 5))),
        ],
        "waterbirds-dist": [
            (1, ((110, 23), (10, 23))),
            (1, ((89, 39), (1, 29))),
            (1, ((81, 35), (9, 31))),
            (1, ((23, 23), (10, 110))),
            (1, ((29, 39), (1, 89))),
            (9, ((126, 1), (1, 31))),
            (16, ((127, 1), (1, 31))),
        ],
        "spawrious-4": [
            (2, _twice(_by_class(20, 5))),
            (2, _twice(_flip_classes(_by_class(20, 5)))),
            (2, _twice(_by_attribute(20, 5))),
            (2, _twice(_flip_attributes(_by_attribute(20, 5)))),
            (1, _twice(_flip_classes(_correlated(20, 5)))),
            (9, _twice(_correlated(118, 5))),
            (7, _twice(_correlated(119, 5))),
        ],
        "spawrious-gci-100": _pure(68, 10, ((64, 4), (8, 8), (8, 8))),
    }
)

NAMES = tuple(_PARTITIONS)


def interaction_matrices(name: str) -> NDArray[np.int64]:
    """Return the sample counts of K clients by class and attribute: K × classes × 2.

    name: name of the partition. Raises ConfigurationError if it is unknown.
    """
    partition = _PARTITIONS.get(name)
    if partition is None:
        raise ConfigurationError(
            f"there is no Table 6 partition '{name}'; there are: {', '.join(NAMES)}", name=name
        )
    return np.array([matrix for clients, matrix in partition for _ in range(clients)])
