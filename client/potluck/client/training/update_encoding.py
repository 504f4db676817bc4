"""Decodes a fetched file into the model, and encodes a trained model into an update file."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from potluck.common.errors import DigestMismatchError, ProtocolError
from potluck.common.tensors.auxiliary import Auxiliaries, joined, update_layout
from potluck.common.tensors.compression import compress_file, decompress_file
from potluck.common.tensors.encoding import EncodedUpdate, Encoding, write_encoded
from potluck.common.tensors.layout import Layout
from potluck.common.tensors.tensor_drafts import drafted
from potluck.common.tensors.tensor_files import FileDigest, open_tensors, write_tensors
from potluck.rpc.v1 import transfer_pb2

_ENCODINGS: Mapping[int, Encoding] = {
    transfer_pb2.ENCODING_FLOAT32: Encoding.FLOAT32,
    transfer_pb2.ENCODING_BFLOAT16: Encoding.BFLOAT16,
    transfer_pb2.ENCODING_INT8: Encoding.INT8,
}


def encoding_of(number: int) -> Encoding:
    """Return the encoding with this number. Raises ProtocolError if it is unknown."""
    found = _ENCODINGS.get(number)
    if found is None:
        raise ProtocolError(
            f"encoding {number} is not one of {', '.join(Encoding)}; use one of these, or update "
            "the software of this host",
            encoding=number,
        )
    return found


def decode_model(
    source: Path,
    target: Path,
    *,
    blake3: str,
    encoding: int,
    compressed: bool,
    base: Path | None,
    layout: Layout | None,
    maximum_bytes: int,
) -> None:
    """Decode the model in `source` and write it to `target`, as float32. Blocks the thread.

    `base`: the model from which `source` is a difference. `layout`: the model's; needed without a
    base.
    A compressed file that holds more than `maximum_bytes` is refused with TooLargeError.
    Raises DigestMismatchError unless the result is the model announced as `blake3`, LayoutError,
    ProtocolError or StorageError.
    """
    with contextlib.ExitStack() as stack:
        if compressed:
            packed, source = source, source.with_name(source.name + ".plain")
            stack.callback(source.unlink, missing_ok=True)
            decompress_file(packed, source, maximum=maximum_bytes)
        file = stack.enter_context(open_tensors(source))
        base_file = None if base is None else stack.enter_context(open_tensors(base))
        model_layout = base_file.layout if base_file is not None else layout
        if model_layout is None:
            raise ProtocolError("a whole model can't be decoded without its layout")
        encoded = EncodedUpdate(file, model_layout, encoding_of(encoding), base_file)
        with drafted(target, model_layout) as draft:
            encoded.decode_to(draft)
            written = draft.finish()
    if written.blake3 != blake3:
        target.unlink(missing_ok=True)
        raise DigestMismatchError(
            f"the decoded model has the digest {written.blake3[:12]}…, but {blake3[:12]}… was "
            "announced; install the same version of the task on the host and the coordinator",
            announced=blake3,
            actual=written.blake3,
        )


def write_update(
    path: Path,
    arrays: Mapping[str, NDArray[Any]],
    *,
    encoding: Encoding,
    base: Path | None,
    compressed: bool,
    seed: int,
    auxiliaries: Auxiliaries | None = None,
    over: Path | None = None,
) -> FileDigest:
    """Write trained arrays as an update file, compressed if `compressed`. Blocks the thread.

    `base`: the model that is subtracted before sending; None to send whole weights. `seed`: seed of
    the random rounding to int8. `auxiliaries`: further tensors to send, not encoded. `over`: a
    spare file to overwrite. Raises LayoutError, NotFiniteError or StorageError.
    """
    beside = joined(auxiliaries or {})
    layout = update_layout(Layout.of(arrays), encoding, auxiliaries or ())
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, 1))))
    plain = path.with_name(path.name + ".plain") if compressed else path
    with contextlib.ExitStack() as stack:
        base_file = None if base is None else stack.enter_context(open_tensors(base))
        if base_file is None and encoding is Encoding.FLOAT32:
            digest = write_tensors(plain, {**arrays, **beside}, layout=layout, over=over)
        else:
            draft = stack.enter_context(drafted(plain, layout, over=over))
            base_arrays = None if base_file is None else base_file.arrays
            write_encoded(draft, arrays, encoding, base=base_arrays, generator=generator)
            for name, array in beside.items():
                draft.put(name, 0, array)
            digest = draft.finish()
    if not compressed:
        return digest
    try:
        return compress_file(plain, path)
    finally:
        plain.unlink()
