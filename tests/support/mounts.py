"""Small, read-only or failing file systems for tests; only root may mount them."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path


def why_not() -> str:
    """Return why no file system can be mounted here; empty if one can."""
    if sys.platform != "linux":
        return "tmpfs is Linux's"
    if os.geteuid() != 0:
        return "only root may mount a file system"
    if shutil.which("mount") is None:
        return "there is no mount command"
    tried = subprocess.run(
        ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"],
        capture_output=True,
        text=True,
        check=False,
    )
    return tried.stderr.strip()


@contextlib.contextmanager
def tmpfs(folder: Path, *, megabytes: int, read_only: bool = False) -> Iterator[Path]:
    """Mount a file system of that size, in memory, at `folder`."""
    folder.mkdir(exist_ok=True)
    options = f"size={megabytes}m,mode=700{',ro' if read_only else ''}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


class FailingDisk:
    """A file system that can become read-only while in use, as on a broken disk."""

    def __init__(self, image: Path, folder: Path) -> None:
        self._image = image
        self._folder = folder

    def turn_read_only(self) -> None:
        """Stop all writes, also to files that are already open."""
        _run("mount", "-o", "remount,abort", str(self._folder))

    def lose_data(self, *paths: Path) -> None:
        """Make reads of these files fail with EIO. They must not be open for writing."""
        for path in paths:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            # Drop cached pages, so that reads need the disk.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
        os.truncate(self._image, 0)

    def mend(self) -> None:
        """Repair the file system and mount it writable again; it must not be in use meanwhile."""
        _run("umount", str(self._folder))
        _run("e2fsck", "-fp", str(self._image), fine=(0, 1))
        self.mount()

    def mount(self) -> None:
        options = "loop,errors=remount-ro"
        _run("mount", "-t", "ext4", "-o", options, str(self._image), str(self._folder))


def why_no_failing_disk() -> str:
    """Return why no failing disk can be made here; empty if one can."""
    if reason := why_not():
        return reason
    if shutil.which("mkfs.ext4") is None:
        return "there is no mkfs.ext4 (Debian: apt-get install e2fsprogs)"
    return "" if Path("/dev/loop-control").exists() else "there are no loop devices"


@contextlib.contextmanager
def failing_disk(folder: Path, *, megabytes: int) -> Iterator[FailingDisk]:
    """Mount a file system at `folder`; its content is in a file next to the folder."""
    folder.mkdir(exist_ok=True)
    image = folder.with_name(f"{folder.name}.image")
    with image.open("wb") as file:
        file.truncate(megabytes << 20)
    _run("mkfs.ext4", "-q", str(image))
    disk = FailingDisk(image, folder)
    disk.mount()
    try:
        yield disk
    finally:
        _run("umount", "--lazy", str(folder))


def _run(*command: str, fine: tuple[int, ...] = (0,)) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in fine:
        raise RuntimeError(f"{command[0]}: {done.stderr.strip()}")


def fill(folder: Path, *, leave_bytes: int) -> Path:
    """Fill a file system except `leave_bytes`; delete the returned file to free the space."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1 << 16)):
            pass
    os.truncate(filler, max(0, filler.stat().st_size - leave_bytes))
    return filler
