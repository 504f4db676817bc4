"""The coordinator's model files, shared by independent runs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from potluck.common.errors import StorageError
from potluck.server.store.file_hold import held
from potluck.server.store.model_files import ModelFiles, Rendition

ARRAYS = {"weights": np.arange(1000, dtype=np.float32)}
OTHERS = {"weights": np.zeros(1000, dtype=np.float32)}


def test_newly_written_model_is_not_deleted_by_the_cleanup_of_another_run(tmp_path: Path) -> None:
    files = ModelFiles(tmp_path)
    old, new = files.write(OTHERS), files.write(ARRAYS)
    both = {old.blake3, new.blake3}
    assert files.unsettled() == both
    files.needed({old.blake3})
    files.settle({old.blake3})
    files.delete({new.blake3})  # by a run that doesn't know the new model
    assert files.existing(new.blake3).is_file()
    assert files.unsettled() == {new.blake3}
    files.needed(both)
    files.reconsider({old.blake3})
    assert files.unsettled() == both
    files.delete(both)
    assert list(tmp_path.iterdir()) == []
    assert files.unsettled() == set()


def test_published_model_is_not_deleted_before_it_is_released(tmp_path: Path) -> None:
    digest = ModelFiles(tmp_path).write(ARRAYS)
    files = ModelFiles(tmp_path)
    assert files.clear_leftovers() == {digest.blake3}
    files.published(digest.blake3)
    files.delete({digest.blake3})
    assert files.existing(digest.blake3).is_file()
    files.let_go({digest.blake3})
    files.delete(files.unsettled())
    assert list(tmp_path.iterdir()) == []


def test_several_runs_can_write_the_same_model_at_once(tmp_path: Path) -> None:
    files = ModelFiles(tmp_path)

    def write(_: int) -> str:
        digest = files.write(ARRAYS)
        return files.publish(digest, [Rendition.whole(digest)]).blake3

    with ThreadPoolExecutor(8) as pool:
        [blake3] = set(pool.map(write, range(64)))
    files.verify(blake3)
    assert {path.name for path in tmp_path.iterdir()} == {f"{blake3}.safetensors", f"{blake3}.json"}


def test_partial_model_file_left_by_a_kill_is_deleted(tmp_path: Path) -> None:
    files = ModelFiles(tmp_path)
    digest = files.write(ARRAYS)
    (tmp_path / ".abc").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("a person's own")
    assert ModelFiles(tmp_path).clear_leftovers() == {digest.blake3}
    (tmp_path / "notes.txt").unlink()
    assert [path.stem for path in tmp_path.iterdir()] == [digest.blake3]


def test_damaged_model_file_is_refused(tmp_path: Path) -> None:
    files = ModelFiles(tmp_path)
    digest = files.write(ARRAYS)
    path = files.existing(digest.blake3)
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(StorageError, match="its BLAKE3 digest differs from its name"):
        files.verify(digest.blake3)


def dropped(files: ModelFiles, blake3: str) -> None:
    files.needed({blake3})
    files.delete({blake3})


def test_released_model_file_is_overwritten_by_the_next_model(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    files = ModelFiles(folder)
    old = files.write(OTHERS)
    inode = files.existing(old.blake3).stat().st_ino
    dropped(files, old.blake3)
    new = files.write(ARRAYS)
    assert files.existing(new.blake3).stat().st_ino == inode
    files.verify(new.blake3)
    assert [path.stem for path in folder.iterdir()] == [new.blake3]


def test_model_file_that_is_being_read_is_not_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    files = ModelFiles(folder)
    old = files.write(OTHERS)
    with files.opened(old.blake3) as file:
        dropped(files, old.blake3)
        files.write({"weights": np.ones(3, dtype=np.float32)})
        assert np.array_equal(file.arrays["weights"], OTHERS["weights"])


def test_model_file_is_not_deleted_while_a_backup_holds_the_folder(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    files = ModelFiles(tmp_path / "models")
    digest = files.write({"weight": np.zeros(3, np.float32)}).blake3
    files.let_go({digest})
    with held(tmp_path / "models"):
        files.delete({digest})
        assert files.path(digest).is_file()
        assert files.unsettled() == {digest}  # tried again after the next round
    files.delete({digest})
    assert not files.path(digest).exists()
