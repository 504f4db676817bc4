"""Zeros are stored as holes in files; reading returns them as zeros."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from potluck.common.net.transfer import FileReceiver
from potluck.common.tensors.digest import digest_of
from potluck.common.tensors.holes import reserve, write_at
from potluck.common.tensors.layout import Layout
from potluck.common.tensors.tensor_drafts import drafted
from potluck.common.tensors.tensor_files import file_digest, open_tensors, write_tensors

MEGABYTE = 2**20


def arrays(elements: int = 4 * MEGABYTE) -> dict[str, np.ndarray]:
    """Return 16 MiB of zeros with a few numbers among them, and a tensor of zeros at the end."""
    large = np.zeros(elements, np.float32)
    large[elements // 2 : elements // 2 + 10] = 3.0
    return {"large": large, "last": np.zeros(MEGABYTE, np.int8)}


def held(path: Path) -> int:
    """Return the number of bytes that a file takes on the disk."""
    return path.stat().st_blocks * 512


@pytest.mark.parametrize("over", [False, True])
def test_tensor_file_with_holes_has_the_correct_length_and_values(
    tmp_path: Path, *, over: bool
) -> None:
    spare = tmp_path / "spare"
    if over:
        spare.write_bytes(os.urandom(20 * MEGABYTE))
    path, values = tmp_path / "file", arrays()
    digest = write_tensors(path, values, over=spare if over else None)
    assert file_digest(path) == digest
    assert over or held(path) < 4 * MEGABYTE
    with open_tensors(path) as file:
        for name, array in values.items():
            assert np.array_equal(file.arrays[name], array)


def test_draft_with_holes_can_be_written_to_later(tmp_path: Path) -> None:
    values = arrays()
    with drafted(tmp_path / "file", Layout.of(values)) as draft:
        draft.put("large", 0, values["large"])
        draft.put("last", 0, values["last"])
        assert held(draft.path) < 4 * MEGABYTE
        draft.arrays["large"][:5] = 1.0
        values["large"][:5] = 1.0
        digest = draft.finish()
    assert file_digest(tmp_path / "file") == digest
    with open_tensors(tmp_path / "file") as file:
        assert np.array_equal(file.arrays["large"], values["large"])


@pytest.mark.parametrize("broken", [False, True])
def test_received_file_that_ends_with_zeros_is_complete(tmp_path: Path, *, broken: bool) -> None:
    content = b"\x01" + bytes(3 * MEGABYTE)
    blake3, path = digest_of(content), tmp_path / "file"

    def receiver(offset: int) -> FileReceiver:
        size = len(content)
        return FileReceiver(path, blake3=blake3, size=size, offset=offset, maximum=size)

    receiving = receiver(0)
    for begin in range(0, len(content), MEGABYTE):
        receiving.write(content[begin : begin + MEGABYTE])
        if broken:
            receiving.close()
            assert receiving.received == min(begin + MEGABYTE, len(content))
            receiving = receiver(receiving.received)
    assert receiving.finish(blake3).read_bytes() == content
    receiving.close()
    assert held(path) < 3 * MEGABYTE


def test_written_zeros_replace_existing_bytes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abcdef")
    with path.open("r+b", buffering=0) as file:
        write_at(file.fileno(), memoryview(bytes(3)), 4)
        assert path.read_bytes() == b"abcd\0\0\0"
        write_at(file.fileno(), memoryview(b"xy"), 1)
        write_at(file.fileno(), memoryview(b""), 2)
    assert path.read_bytes() == b"axyd\0\0\0"


@pytest.mark.parametrize("called", [True, False])
def test_reserved_file_has_no_holes_and_keeps_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, called: bool
) -> None:
    if not called:  # as on macOS
        monkeypatch.delattr(os, "posix_fallocate")
    path, size = tmp_path / "file", 2 * MEGABYTE + 7
    with path.open("w+b") as file:
        write_at(file.fileno(), memoryview(b"held"), MEGABYTE + 3)
        reserve(file.fileno(), size)
        file.flush()
        os.fsync(file.fileno())
        assert held(path) >= size
    found = path.read_bytes()
    assert found == bytes(MEGABYTE + 3) + b"held" + bytes(size - MEGABYTE - 7)


def test_reserving_never_shortens_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fallocate")
    path = tmp_path / "file"
    path.write_bytes(b"longer than that")
    with path.open("r+b") as file:
        reserve(file.fileno(), 6)
    assert path.read_bytes() == b"longer than that"
