"""Sparse files on a full tmpfs. Reading a hole through a memory map needs a free page; without one,
the kernel kills the process with SIGBUS."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support import mounts

from potluck.common.net.frames import chunk_of, file_messages
from potluck.common.net.transfer import FileReceiver
from potluck.common.tensors.digest import digest_of
from potluck.common.tensors.layout import Layout
from potluck.common.tensors.tensor_drafts import drafted
from potluck.common.tensors.tensor_files import open_tensors, write_tensors

pytestmark = pytest.mark.skipif(bool(mounts.why_not()), reason=mounts.why_not() or "can mount")
MEGABYTE = 1 << 20
ZEROS = {"weight": np.zeros(MEGABYTE, np.float32)}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with mounts.tmpfs(tmp_path / "state", megabytes=6) as folder:
        yield folder


def test_sparse_file_on_a_full_tmpfs_is_served(folder: Path) -> None:
    digest = write_tensors(folder / "model", ZEROS)
    mounts.fill(folder, leave_bytes=0)
    chunks = [chunk_of(message) for message in file_messages(folder / "model", 0)]
    assert digest_of(b"".join(chunk for chunk in chunks if chunk is not None)) == digest.blake3


def test_received_sparse_file_on_a_full_tmpfs_is_verified(folder: Path) -> None:
    content = b"\x01" + bytes(4 * MEGABYTE)
    blake3, size = digest_of(content), len(content)
    receiver = FileReceiver(folder / "file", blake3=blake3, size=size, offset=0, maximum=size)
    for begin in range(0, size, MEGABYTE):
        receiver.write(content[begin : begin + MEGABYTE])
    mounts.fill(folder, leave_bytes=0)
    assert receiver.finish(blake3).stat().st_size == size
    receiver.close()


def test_sparse_draft_on_a_full_tmpfs_is_digested(folder: Path) -> None:
    with drafted(folder / "model", Layout.of(ZEROS)) as draft:
        draft.put("weight", 0, ZEROS["weight"])
        mounts.fill(folder, leave_bytes=0)
        assert draft.finish() == write_tensors(folder.parent / "same", ZEROS)


def test_arrays_of_a_sparse_file_on_a_full_tmpfs_are_read(folder: Path) -> None:
    write_tensors(folder / "model", ZEROS)
    mounts.fill(folder, leave_bytes=0)
    with open_tensors(folder / "model") as file:
        assert not file.arrays["weight"].any()
