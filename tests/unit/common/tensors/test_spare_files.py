"""Spare files, and files written over them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from potluck.common.errors import DigestMismatchError, TruncatedError
from potluck.common.net.transfer import FileReceiver, held_bytes
from potluck.common.tensors.digest import digest_of
from potluck.common.tensors.spare_files import SpareFiles
from potluck.common.tensors.tensor_files import file_digest, open_tensors, write_tensors


def spare_file(tmp_path: Path, size: int = 1000) -> Path:
    path = tmp_path / "old"
    path.write_bytes(b"x" * size)
    return path


def receiver(path: Path, content: bytes, *, over: Path | None, offset: int = 0) -> FileReceiver:
    return FileReceiver(
        path,
        blake3=digest_of(content),
        size=len(content),
        offset=offset,
        maximum=10_000,
        over=over,
    )


def test_spare_files_keeps_at_most_its_maximum_of_files(tmp_path: Path) -> None:
    spare = SpareFiles(tmp_path / "spare", keep=1)
    assert spare.take() is None
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text("first")
    second.write_text("second")
    spare.give(first)
    spare.give(second)
    spare.give(tmp_path / "missing")
    assert not first.exists()
    assert not second.exists()
    taken = spare.take()
    assert taken is not None
    assert taken.read_text() == "first"
    assert spare.take() is None


def test_spare_files_skips_deleted_files(tmp_path: Path) -> None:
    spare = SpareFiles(tmp_path / "spare", keep=2)
    for name in ("first", "second"):
        (tmp_path / name).write_text(name)
        spare.give(tmp_path / name)
    (tmp_path / "spare" / "1").unlink()
    taken = spare.take()
    assert taken is not None
    assert taken.read_text() == "first"
    assert spare.take() is None


def test_spare_files_deletes_files_of_an_earlier_process(tmp_path: Path) -> None:
    folder = tmp_path / "spare"
    folder.mkdir()
    (folder / "0").write_text("left")
    assert SpareFiles(folder, keep=1).take() is None
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("size", [10, 500, 5000])
def test_file_received_over_a_spare_file_equals_the_sent_content(tmp_path: Path, size: int) -> None:
    content, path = b"new" * 300, tmp_path / "file"
    old = spare_file(tmp_path, size)
    incoming = receiver(path, content, over=old)
    incoming.write(content)
    assert incoming.finish(digest_of(content)) == path
    incoming.close()
    assert path.read_bytes() == content
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_interrupted_transfer_over_a_spare_file_keeps_only_the_received_bytes(
    tmp_path: Path,
) -> None:
    content, path = b"new" * 300, tmp_path / "file"
    broken = receiver(path, content, over=spare_file(tmp_path))
    broken.write(content[:400])
    with pytest.raises(TruncatedError):
        broken.finish(digest_of(content))
    broken.close()
    assert held_bytes(path) == 400
    second_spare = spare_file(tmp_path)
    rest = receiver(path, content, over=second_spare, offset=400)
    assert not second_spare.exists()  # deleted: a part exists to resume from
    rest.write(content[400:])
    rest.finish(digest_of(content))
    rest.close()
    assert path.read_bytes() == content


def test_killed_transfer_over_a_spare_file_restarts_from_zero(tmp_path: Path) -> None:
    content, path = b"new" * 300, tmp_path / "file"
    (tmp_path / "file.over").write_bytes(content[:400] + b"x" * 600)
    assert held_bytes(path) == 0
    again = receiver(path, content, over=spare_file(tmp_path))
    again.write(content)
    again.finish(digest_of(content))
    again.close()
    assert path.read_bytes() == content
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_file_with_a_wrong_digest_is_deleted(tmp_path: Path) -> None:
    content, path = b"new" * 300, tmp_path / "file"
    wrong = receiver(path, content, over=spare_file(tmp_path))
    wrong.write(bytes(len(content)))
    with pytest.raises(DigestMismatchError):
        wrong.finish(digest_of(content))
    wrong.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [10, 100_000])
def test_tensors_written_over_a_spare_file_equal_those_in_a_new_file(
    tmp_path: Path, size: int
) -> None:
    arrays = {"w": np.arange(1000, dtype=np.float32)}
    plain = write_tensors(tmp_path / "plain", arrays)
    written = write_tensors(tmp_path / "over", arrays, over=spare_file(tmp_path, size))
    assert written == plain == file_digest(tmp_path / "over")
    with open_tensors(tmp_path / "over") as file:
        assert (file.arrays["w"] == arrays["w"]).all()
    assert not (tmp_path / "old").exists()
