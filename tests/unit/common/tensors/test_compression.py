"""Compressed files: unchanged contents, and a maximum size."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.common.errors import LayoutError, TooLargeError
from potluck.common.tensors.compression import compress_file, decompress_file
from potluck.common.tensors.tensor_files import file_digest


@given(content=st.binary(max_size=100_000))
def test_decompressed_file_equals_the_original(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    folder = tmp_path_factory.mktemp("files")
    (folder / "plain").write_bytes(content)
    digest = compress_file(folder / "plain", folder / "packed")
    assert digest == file_digest(folder / "packed")
    decompress_file(folder / "packed", folder / "again", maximum=len(content))
    assert (folder / "again").read_bytes() == content
    assert sorted(path.name for path in folder.iterdir()) == ["again", "packed", "plain"]


def test_decompression_beyond_the_maximum_size_is_stopped(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(bytes(50_000_000))
    digest = compress_file(tmp_path / "plain", tmp_path / "packed")
    assert digest.size < 100_000
    with pytest.raises(TooLargeError, match="more than 1000000 bytes"):
        decompress_file(tmp_path / "packed", tmp_path / "again", maximum=1_000_000)
    assert not (tmp_path / "again").exists()


def test_file_announced_as_compressed_that_is_not_is_refused(tmp_path: Path) -> None:
    (tmp_path / "packed").write_bytes(b"no zstd at all" * 100)
    with pytest.raises(LayoutError, match="announced as compressed"):
        decompress_file(tmp_path / "packed", tmp_path / "again", maximum=1_000_000)
    assert [path.name for path in tmp_path.iterdir()] == ["packed"]
