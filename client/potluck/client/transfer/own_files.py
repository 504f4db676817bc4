"""Folders for files that tasks' own trainers keep from one training to the next.

Each run and client has one folder; the trainer makes it if needed. Potluck neither sends nor reads
its files, and does not restore them if a round fails.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from pathlib import Path

from potluck.client.transfer.saved_states import KEPT_DAYS


class OwnFiles:
    """The folders within a folder. `folder` may be called from any thread."""

    def __init__(self, path: Path, *, now: float | None = None) -> None:
        """Delete folders that no training has used for `KEPT_DAYS`. `now`: seconds since 1970."""
        self._path = path
        oldest = (time.time() if now is None else now) - KEPT_DAYS * 86400.0
        for each in path.iterdir():
            if each.stat().st_mtime < oldest:
                shutil.rmtree(each, ignore_errors=True)

    def folder(self, run_id: str, client_id: str) -> Path:
        """Return a client's folder in a run, and mark it as used; it may not exist yet."""
        text = f"{run_id}\n{client_id}"
        folder = self._path / hashlib.sha256(text.encode()).hexdigest()[:40]
        if folder.is_dir():
            folder.touch()
        return folder
