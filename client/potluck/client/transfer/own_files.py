"""Folders for files that tasks' own trainers keep from one training to the next.

One for each run and client, made by the trainer that wants it. What lies in it is the trainer's own
business: it is neither sent nor read, and no round's failure takes it back.
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
        """Delete those that no training used for `KEPT_DAYS`. `now`: seconds since 1970."""
        self._path = path
        oldest = (time.time() if now is None else now) - KEPT_DAYS * 86400.0
        for each in path.iterdir():
            if each.stat().st_mtime < oldest:
                shutil.rmtree(each, ignore_errors=True)

    def folder(self, run_id: str, client_id: str) -> Path:
        """The folder of a client in a run; it may not be there yet. Notes that it is in use."""
        text = f"{run_id}\n{client_id}"
        folder = self._path / hashlib.sha256(text.encode()).hexdigest()[:40]
        if folder.is_dir():
            folder.touch()
        return folder
