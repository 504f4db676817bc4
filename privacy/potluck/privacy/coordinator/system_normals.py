"""Gaussian noise from the operating system's generator."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

Normals = Callable[[int], NDArray[np.float64]]
"""Function that returns as many independent standard normal numbers as asked for. Thread-safe."""

_WORD: Final = 2.0**-64


def system_normals(count: int) -> NDArray[np.float64]:
    """Return `count` standard normal numbers, from random bytes of the operating system.

    Box and Muller's transform of 64-bit numbers: no number is beyond ±9.5, which a normal one is
    with a probability of 3·10⁻²¹. The caller adds them in float64 and rounds the result to float32.
    So the few float64 numbers that the transform can't reach don't show in the low bits.
    """
    pairs = -(-count // 2)
    words = np.frombuffer(os.urandom(16 * pairs), np.uint64).reshape(2, pairs)
    uniform = words.astype(np.float64)
    uniform += 0.5
    uniform *= _WORD  # in (0, 1]
    radius, angle = uniform
    np.log(radius, out=radius)
    radius *= -2.0
    np.sqrt(radius, out=radius)
    angle *= 2.0 * np.pi
    found = np.empty((2, pairs))
    np.cos(angle, out=found[0])
    np.sin(angle, out=found[1])
    found *= radius
    return found.reshape(-1)[:count]
