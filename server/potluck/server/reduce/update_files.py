"""Checks and reads files of updates. Blocking."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from potluck.common.errors import LayoutError, RunError
from potluck.common.run_file.run_settings import DirectionSettings
from potluck.common.tensors.auxiliary import (
    auxiliary_of,
    check_auxiliary_numbers,
    update_layout,
    weights_of,
)
from potluck.common.tensors.compression import decompress_file
from potluck.common.tensors.encoding import EncodedUpdate, Encoding
from potluck.common.tensors.flat import FlatVector, TensorBorders
from potluck.common.tensors.layout import Layout
from potluck.common.tensors.tensor_files import NamedTensors, TensorFile, Tensors, open_tensors
from potluck.server.selection import Floats
from potluck.server.store.records import UpdateRow
from potluck.server.strategy import Combine

# Updates that omit tensors ------------------------------------------------------------------------
# An omitted tensor is read as unchanged, and the update is excluded from the mean of that tensor.


class PartialUpdate(EncodedUpdate):
    """An update that omits some tensors. The omitted tensors are read with the values of the
    round's model."""

    def __init__(
        self,
        file: Tensors,
        model: Tensors,
        dropped: Collection[str],
        encoding: Encoding,
        *,
        delta: bool,
    ) -> None:
        """model: the round's model, with the tensors of complete updates. delta: True if the file
        contains differences from the model.

        Raises LayoutError unless the file contains exactly the tensors outside `dropped`.
        """
        left = model.layout.without_names(dropped)
        base = NamedTensors.some(model, left) if delta else None
        super().__init__(file, left, encoding, base)
        self.layout = model.layout
        self._model = FlatVector(model.arrays, model.layout)
        self._borders = TensorBorders(model.layout)
        self._missing: dict[str, int] = {}
        """For each tensor, the number of elements by which its offset in the file is smaller than
        in the complete layout; -1 if omitted."""
        ahead = 0
        for tensor in model.layout.tensors:
            if tensor.floating:
                self._missing[tensor.name] = -1 if tensor.name in dropped else ahead
                ahead += tensor.elements if tensor.name in dropped else 0

    def block(
        self, begin: int, end: int, scratch: NDArray[np.float32]
    ) -> NDArray[np.floating[Any]]:
        """Return elements [begin, end) of the weights, always in `scratch`; see
        `EncodedUpdate.block`."""
        return self.read(begin, end, scratch[: end - begin])

    def read(self, begin: int, end: int, out: NDArray[np.float32]) -> NDArray[np.float32]:
        """Write elements [begin, end) of the weights into `out`, and return it; see
        `EncodedUpdate.read`."""
        for place, name in self._borders.parts(begin, end):
            first, last, ahead = begin + place.start, begin + place.stop, self._missing[name]
            if ahead < 0:
                self._model.read(first, last, out[place])
            else:
                super().read(first - ahead, last - ahead, out[place])
        return out


def shares_sent(layout: Layout, dropped: Sequence[Collection[str]]) -> Floats:
    """Return, for each update, the share of the model's floating-point elements that it contains.

    layout: layout of complete updates.
    """
    sizes = {tensor.name: tensor.elements for tensor in layout.tensors if tensor.floating}
    missing = np.array([sum(sizes[name] for name in names) for names in dropped])
    shares: Floats = 1.0 - missing / max(1, layout.parameters)
    return shares


def renormalized(combine: Combine, dropped: Sequence[Collection[str]]) -> Combine:
    """Return the reduction with each tensor averaged over only the updates that have it.

    dropped: for each update, the tensors that it omits. The weights of the remaining updates are
    scaled so that their sum stays the same. A tensor stays unchanged if no update with a weight
    contains it.
    """
    names = sorted(set[str]().union(*dropped))
    if not names:
        return combine
    changed = dict(combine.tensor_weights)
    for name in names:
        weights = changed.get(name, combine.weights)
        sent = np.where([name in each for each in dropped], 0.0, weights)
        total = sent.sum()
        if total != 0:
            changed[name] = sent * (weights.sum() / total)
    return replace(combine, tensor_weights=changed)


# Files --------------------------------------------------------------------------------------------

Update = EncodedUpdate | TensorFile
"""An open update from the spool; a plain file contains all weights as float32."""


@dataclass(frozen=True, kw_only=True)
class SpooledUpdate:
    """A verified update. dropped: names of the tensors that it omits."""

    client: str
    path: Path
    row: UpdateRow
    dropped: Sequence[str] = ()


class UpdateFiles:
    """The expected form of a run's update files: layout of the tensors, settings of the upload, and
    names of the auxiliaries (tensors sent beside the weights)."""

    def __init__(self, layout: Layout, up: DirectionSettings, auxiliaries: Iterable[str]) -> None:
        """Raises LayoutError if the tensors can't be sent in this form."""
        self.layout = layout
        self._up = up
        self._auxiliaries = sorted(auxiliaries)
        self._expected = update_layout(layout, up.encoding, self._auxiliaries)

    def leaving_out(self, dropped: Sequence[str]) -> UpdateFiles:
        """Return the form of an update that omits these tensors."""
        if not dropped:
            return self
        left = self.layout.without_names(dropped)
        return UpdateFiles(left, self._up, self._auxiliaries)

    @property
    def largest(self) -> int:
        """Maximum size of an update in bytes. It is above the size of a valid update: a file that
        is slightly too large is received, so that an error can name its fault."""
        return 2 * self._expected.file_bytes + (1 << 20)

    @property
    def delta(self) -> bool:
        """True if updates are differences from the model."""
        return self._up.delta

    def check(
        self, path: Path, base: Tensors | None, *, compressed: bool, finite: bool = False
    ) -> None:
        """Check that a received file has the layout of an update, and valid numbers.

        base: the round's model, of the same layout. finite: True if a `FiniteScreen` found only
        finite numbers. Raises LayoutError, NotFiniteError, OutOfBoundsError, TooLargeError.
        """
        plain = self._up.encoding is Encoding.FLOAT32 and not self._up.delta and not compressed
        with self.open(path, compressed=compressed) as file:
            if finite and plain and file.aligned:
                return  # a `FiniteScreen` has checked all numbers of the file
            EncodedUpdate(weights_of(file), self.layout, self._up.encoding, base).check_numbers()
            check_auxiliary_numbers(file)

    def open(self, path: Path, *, compressed: bool) -> TensorFile:
        """Open an update's file. Raises LayoutError if its tensors are not those of an update."""
        if compressed:
            packed, path = path, path.with_suffix(".plain")
            if not path.exists():
                decompress_file(packed, path, maximum=self.largest)
        try:
            return open_tensors(path, expected=self._expected)
        except LayoutError as error:
            raise LayoutError(f"update refused: {error.message}", **error.metadata) from None

    def weights(self, file: TensorFile, base: Tensors | None) -> EncodedUpdate:
        """Return a reader that decodes the weights of an open file."""
        return EncodedUpdate(weights_of(file), self.layout, self._up.encoding, base)

    def partial_weights(
        self, file: TensorFile, model: Tensors, dropped: Sequence[str]
    ) -> PartialUpdate:
        """Return a reader that decodes the weights of an open update that omits tensors. model: the
        round's model."""
        delta, encoding = self._up.delta, self._up.encoding
        return PartialUpdate(weights_of(file), model, dropped, encoding, delta=delta)

    def auxiliary(self, file: TensorFile, name: str) -> EncodedUpdate:
        """Return a reader of one auxiliary in an open file."""
        tensors = auxiliary_of(file, name, self.layout)
        return EncodedUpdate(tensors, tensors.layout)


@dataclass(frozen=True, kw_only=True)
class OneUpdate:
    """One client's update, for strategies that read each update separately."""

    client: str
    files: UpdateFiles
    file: TensorFile
    encoded: EncodedUpdate

    def weights(self) -> dict[str, NDArray[Any]]:
        """Return all tensors of the client's model, copied into memory."""
        return self.encoded.decode_to_arrays()

    def tensor(self, name: str) -> NDArray[np.float32]:
        """Return one of the floating-point tensors, copied into memory."""
        begin = 0
        for tensor in self.encoded.layout.tensors:
            if tensor.floating:
                end = begin + tensor.elements
                if tensor.name == name:
                    values = np.empty(tensor.elements, np.float32)
                    return self.encoded.read(begin, end, values).reshape(tensor.shape)
                begin = end
        raise KeyError(name)

    def auxiliary(self, name: str) -> dict[str, NDArray[Any]]:
        """Return one of the update's auxiliaries, copied into memory."""
        return self.files.auxiliary(self.file, name).decode_to_arrays()


def decoders_of(updates: Sequence[Update], layout: Layout) -> list[EncodedUpdate]:
    """Return a reader for each update. Raises LayoutError if an update does not have this
    layout."""
    if not updates:
        raise RunError("a round needs at least one update; wait for a client")
    decoders = [u if isinstance(u, EncodedUpdate) else EncodedUpdate(u, layout) for u in updates]
    for decoder in decoders:
        if decoder.layout != layout:
            decoder.layout.check_matches(layout)
            raise RunError("an update was opened with a different order of tensors than the model")
    return decoders
