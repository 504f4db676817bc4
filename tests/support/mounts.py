"""File systems as small, or as read-only, as a test wants; only root may mount them."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path


def why_not() -> str:
    """Why nothing can be mounted here; empty if it can."""
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
    """A file system of that size, in memory, at `folder`."""
    folder.mkdir(exist_ok=True)
    options = f"size={megabytes}m,mode=700{',ro' if read_only else ''}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path, *, leave_bytes: int) -> Path:
    """Fill a file system but for so many bytes; delete the file to make room again."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1 << 16)):
            pass
    os.truncate(filler, max(0, filler.stat().st_size - leave_bytes))
    return filler
