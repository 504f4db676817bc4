"""Updates as files: which they must be, and how they are read. Blocking."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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
from potluck.common.tensors.layout import Layout
from potluck.common.tensors.tensor_files import TensorFile, Tensors, open_tensors
from potluck.server.aggregation.partial_update import PartialUpdate
from potluck.server.store.records import UpdateRow

Update = EncodedUpdate | TensorFile
"""An update as it lies in the spool; a plain file holds whole float32 weights."""


@dataclass(frozen=True, kw_only=True)
class SpooledUpdate:
    """A verified update. dropped: names of the tensors that it leaves out."""

    client: str
    path: Path
    row: UpdateRow
    dropped: Sequence[str] = ()


class UpdateFiles:
    """The form of a run's updates: the layout of the tensors that clients return, the way up, the
    auxiliaries they carry."""

    def __init__(self, layout: Layout, up: DirectionSettings, auxiliaries: Iterable[str]) -> None:
        """Raises LayoutError where the tensors can't be sent so."""
        self.layout = layout
        self._up = up
        self._auxiliaries = sorted(auxiliaries)
        self._expected = update_layout(layout, up.encoding, self._auxiliaries)

    def leaving_out(self, dropped: Sequence[str]) -> UpdateFiles:
        """The form of an update without these tensors."""
        if not dropped:
            return self
        left = self.layout.without_names(dropped)
        return UpdateFiles(left, self._up, self._auxiliaries)

    @property
    def largest(self) -> int:
        """Bytes an update may have; more than it needs, so that a wrong one can be explained."""
        return 2 * self._expected.file_bytes + (1 << 20)

    @property
    def delta(self) -> bool:
        """True if updates are differences from the model."""
        return self._up.delta

    def check(
        self, path: Path, base: Tensors | None, *, compressed: bool, finite: bool = False
    ) -> None:
        """Check that a received file is an update: layout and numbers. `base`: the round's model,
        of the same layout.

        finite: a `FiniteScreen` found nothing in it. Raises LayoutError, NotFiniteError,
        OutOfBoundsError, TooLargeError.
        """
        plain = self._up.encoding is Encoding.FLOAT32 and not self._up.delta and not compressed
        with self.open(path, compressed=compressed) as file:
            if finite and plain and file.aligned:
                return  # reading it all once more would find nothing
            EncodedUpdate(weights_of(file), self.layout, self._up.encoding, base).check_numbers()
            check_auxiliary_numbers(file)

    def open(self, path: Path, *, compressed: bool) -> TensorFile:
        """Open an update's file. Raises LayoutError if it holds other tensors."""
        if compressed:
            packed, path = path, path.with_suffix(".plain")
            if not path.exists():
                decompress_file(packed, path, maximum=self.largest)
        try:
            return open_tensors(path, expected=self._expected)
        except LayoutError as error:
            raise LayoutError(f"update refused: {error.message}", **error.metadata) from None

    def weights(self, file: TensorFile, base: Tensors | None) -> EncodedUpdate:
        """The weights in an open file, decoded as they are read."""
        return EncodedUpdate(weights_of(file), self.layout, self._up.encoding, base)

    def partial_weights(
        self, file: TensorFile, model: Tensors, dropped: Sequence[str]
    ) -> PartialUpdate:
        """The same of an update that leaves tensors out. model: the round's."""
        delta, encoding = self._up.delta, self._up.encoding
        return PartialUpdate(weights_of(file), model, dropped, encoding, delta=delta)

    def auxiliary(self, file: TensorFile, name: str) -> EncodedUpdate:
        """One auxiliary in an open file."""
        tensors = auxiliary_of(file, name, self.layout)
        return EncodedUpdate(tensors, tensors.layout)


@dataclass(frozen=True, kw_only=True)
class OneUpdate:
    """One client's update, for strategies that look at each by itself."""

    client: str
    files: UpdateFiles
    file: TensorFile
    encoded: EncodedUpdate

    def weights(self) -> dict[str, NDArray[Any]]:
        """All tensors of the client's model: a copy in memory."""
        return self.encoded.decode_to_arrays()

    def tensor(self, name: str) -> NDArray[np.float32]:
        """One of the floating-point tensors: a copy in memory."""
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
        """One of its auxiliaries: a copy in memory."""
        return self.files.auxiliary(self.file, name).decode_to_arrays()


def decoders_of(updates: Sequence[Update], layout: Layout) -> list[EncodedUpdate]:
    """Return readers of the updates. Raises LayoutError if one does not have this layout."""
    if not updates:
        raise RunError("there is no update to reduce; wait for at least one client")
    decoders = [u if isinstance(u, EncodedUpdate) else EncodedUpdate(u, layout) for u in updates]
    for decoder in decoders:
        if decoder.layout != layout:
            decoder.layout.check_matches(layout)
            raise RunError("an update was opened with another order of tensors than the model's")
    return decoders
