"""The reduction of masked updates: sums their words block by block, then removes the masks.

As in `reduction`, each block of the floating-point vector is read from every file in client order.
The block is summed modulo 2^32 or 2^64. Then its masks are removed, which leaves the sum of the
clients' differences from the model. No single update is ever unmasked. Each thread needs memory for
a few blocks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from potluck.common.errors import LayoutError, TrainingError
from potluck.common.tensors.tensor_files import TensorFile, open_tensors
from potluck.common.updates.sum_files import AUXILIARY, BODY
from potluck.secagg.masked_vectors import (
    HEAD,
    LOSS,
    NORMALIZER,
    WITHIN,
    file_layout,
)
from potluck.secagg.protocol import Header, SumVector, Unmasking
from potluck.secagg.protocol.primitives.masks import word_dtype
from potluck.secagg.protocol.vectors.updates import BodyDecoder, HeadSum, decode_head
from potluck.server.reduce.move_by_sum import BlockReader

_READ_ELEMENTS: Final = 2**16
"""Number of elements that are added per file at once, so that the sum stays in a core's cache."""


def check_masked(path: Path, header: Header) -> None:
    """Check that a received file has the vectors of words that its session prescribes.

    Raises LayoutError, StorageError. The file's words are masked, so nothing else can be checked.
    """
    try:
        open_tensors(path, expected=file_layout(header.vectors)).close()
    except LayoutError as error:
        raise LayoutError(f"masked update refused: {error.message}", **error.metadata) from None


class MaskedSum:
    """The sum of masked files; reading a part of the sum removes the masks of that part."""

    def __init__(self, files: Sequence[TensorFile], unmasking: Unmasking) -> None:
        """files: the files of exactly `unmasking.survivors`, in their order.

        Raises BrokenRuleError (reconstruction) if the sum is impossible for this number of clients,
        and TrainingError if the training of every client failed.
        """
        self._files, self._unmasking = files, unmasking
        self.header = unmasking.header
        words = self.words(HEAD, 0, self.header.vector(HEAD).length)
        self.head: HeadSum = decode_head(self.header, unmasking.participants, words, len(files))
        if not self.head.weight:
            raise TrainingError(
                "the training of every client in the secure sum failed; see the logs of the "
                "hosts for the reasons, and lower the learning rate if the training diverged"
            )
        self._within = 0.0
        if WITHIN in {vector.name for vector in self.header.vectors}:
            mean = self._reader(self.header.vector(WITHIN), self.head.weight)
            self._within = float(mean(0, 1)[0])

    def share_within(self, counted: float) -> float:
        """Return the fraction of updates within the clip, with noise.

        counted: κ; each update adds κ to the count if it is within the clip, else -κ.
        """
        return 0.5 + self._within / (2 * counted)

    @property
    def weight(self) -> float:
        """The sum of the clients' weights."""
        return self.head.weight

    @property
    def loss(self) -> float:
        """The mean of the clients' losses; NaN if they don't report losses."""
        return self.head.metrics.get(LOSS, math.nan)

    @property
    def normalizer(self) -> float:
        """The mean of the clients' normalizers; 1 if none is needed."""
        return self.head.metrics.get(NORMALIZER, 1.0)

    def words(self, vector: str, begin: int, end: int) -> NDArray[Any]:
        """Return words [begin, end) of a vector's sum, without masks. vector: its name in the
        files, such as `body`. Thread-safe."""
        total = np.zeros(end - begin, word_dtype(self.header.vector(vector).modulus_bits))
        for start in range(begin, end, _READ_ELEMENTS):
            stop = min(start + _READ_ELEMENTS, end)
            some = total[start - begin : stop - begin]
            for file in self._files:
                np.add(some, file.arrays.stored[vector][start:stop], out=some)
        self._unmasking.remove(vector, total, begin)
        return total

    def mean(self) -> BlockReader:
        """Return a reader of the weighted mean difference from the model."""
        return self._reader(self.header.vector(BODY), self.head.weight)

    def sum(self, auxiliary: str) -> BlockReader:
        """Return a reader of an auxiliary's unweighted sum."""
        return self._reader(self.header.vector(f"{AUXILIARY}{auxiliary}"), self.header.weight_bound)

    def _reader(self, vector: SumVector, weight: int) -> BlockReader:
        decoder = BodyDecoder(self.header, vector, self._unmasking.participants, weight)
        return lambda begin, end: decoder.decode(self.words(vector.name, begin, end))


@contextmanager
def opened_sum(paths: Sequence[Path], unmasking: Unmasking) -> Iterator[MaskedSum]:
    """Open the survivors' files while the block runs."""
    layout = file_layout(unmasking.header.vectors)
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open_tensors(path, expected=layout)) for path in paths]
        yield MaskedSum(files, unmasking)
