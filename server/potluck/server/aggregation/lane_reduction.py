"""Combines sums that hosts have computed: integers are added, then divided once.

Integer addition is exact, so the model has the same bits for any grouping of clients into sums, and
any order of arrival.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from potluck.common.errors import RunError
from potluck.common.updates.lane_files import AUXILIARY, BODY, LaneFile, opened_lanes
from potluck.common.updates.lane_packing import add
from potluck.common.updates.lanes import LaneTerms, members_digest, normalizer_of
from potluck.server.aggregation.move_by_sum import BlockReader
from potluck.server.aggregation.update_files import SpooledUpdate


@dataclass(frozen=True, kw_only=True)
class LaneSum:
    """The total of all hosts' sums, read from their open files; see `Total`."""

    files: Sequence[LaneFile]
    terms: LaneTerms
    weight: float
    loss: float
    normalizer: float

    def mean(self) -> BlockReader:
        """Return a reader of the weighted mean difference from the model."""
        return self._reader(BODY, self.terms.scale(round(self.weight)))

    def sum(self, auxiliary: str) -> BlockReader:
        """Return a reader of an auxiliary's unweighted sum."""
        return self._reader(f"{AUXILIARY}{auxiliary}", self.terms.quantum)

    def _reader(self, vector: str, scale: float) -> BlockReader:
        read = add([file.reader(vector) for file in self.files])

        def scaled(begin: int, end: int) -> NDArray[np.float64]:
            return np.multiply(read(begin, end), scale, dtype=np.float64)

        return scaled


@contextmanager
def opened_lane_sum(
    updates: Sequence[SpooledUpdate],
    update_ids: Sequence[str],
    vectors: Mapping[str, int],
    terms: LaneTerms,
    *,
    normalized: bool,
) -> Iterator[LaneSum]:
    """Open the files of the sums; close them at the end of the block.

    updates: the updates in the sums, in client order. update_ids: their ids. vectors: sizes of the
    vectors in the run's updates, by name. normalized: True if each client's difference is divided
    by its normalizer. Raises RunError unless the sums contain exactly these updates; LayoutError,
    StorageError.
    """
    members: dict[Path, list[str]] = {}
    for update, update_id in zip(updates, update_ids, strict=True):
        members.setdefault(update.path, []).append(update_id)
    weights = [terms.weight(update.row.samples) for update in updates]

    def mean(numbers: Sequence[float]) -> float:
        return math.fsum(map(math.prod, zip(weights, numbers, strict=True))) / sum(weights)

    with contextlib.ExitStack() as stack:
        files: list[LaneFile] = []
        for path, ids in members.items():
            file = stack.enter_context(opened_lanes(path, vectors))
            if file.members != members_digest(ids):
                raise RunError(f"the sum {path.name} holds other updates than the round reduces")
            files.append(file)
        yield LaneSum(
            files=files,
            terms=terms,
            weight=float(sum(weights)),
            loss=mean([math.nan if (loss := each.row.loss) is None else loss for each in updates]),
            normalizer=mean([normalizer_of(each.row) for each in updates]) if normalized else 1.0,
        )
