"""The spool of updates when disks fail."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest

from potluck.common.errors import StorageError, disk_error
from potluck.server.live.spool import Spool


def test_spool_folder_that_can_not_be_removed_is_named_in_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool(tmp_path / "ab12")

    def refuse(path: Path) -> None:
        # `rmtree` names an entry without its folder.
        raise OSError(errno.EROFS, "Read-only file system", "16")

    monkeypatch.setattr(shutil, "rmtree", refuse)
    spool.path(1, 1, "a", "e" * 64).touch()
    with pytest.raises(StorageError, match=f"can't use {tmp_path}/ab12: Read-only file system; "):
        spool.remove()
    spool.path(1, 1, "a", "e" * 64).touch()
    with pytest.raises(StorageError, match=f"can't use {tmp_path}/ab12/1.1: Read-only file"):
        spool.clear(1, 1)
    with pytest.raises(StorageError, match=f"can't use {tmp_path}/ab12/1.1.over: Read-only file"):
        spool.clear_except({(2, 1): ()})


def test_upload_that_ends_while_its_spool_is_removed_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool, honest = Spool(tmp_path / "ab12"), shutil.rmtree
    path = spool.path(1, 1, "a", "e" * 64)
    part = path.with_name(f"{path.name}.part")
    part.touch()

    def remove(folder: Path) -> None:
        with pytest.raises(FileNotFoundError):
            part.rename(path)
        honest(folder)

    monkeypatch.setattr(shutil, "rmtree", remove)
    spool.remove()
    assert list(tmp_path.iterdir()) == []


def test_spool_removal_interrupted_by_a_kill_is_completed_by_the_next_removal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool(tmp_path / "ab12")
    spool.path(1, 1, "a", "e" * 64).touch()
    with monkeypatch.context() as killed:
        killed.setattr(shutil, "rmtree", lambda _: None)
        spool.remove()
    spool.path(1, 2, "a", "e" * 64).touch()
    spool.remove()
    assert list(tmp_path.iterdir()) == []


def test_removing_a_missing_spool_succeeds() -> None:
    Spool(Path("/nonexistent")).remove()


def test_disk_error_names_the_file_of_the_error_or_else_the_folder() -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "/state/models/.abc")
    text = disk_error(full, "/state").message
    assert (
        text == "can't use /state/models/.abc: No space left on device; check the disk of this path"
    )
    bare = OSError(errno.ENOSPC, "No space left on device")
    assert disk_error(bare, "/state").message.startswith("can't use /state: No space left")
