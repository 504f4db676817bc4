"""Notes on the runs that a sink has recorded completely, so that it need not query them after a
restart.

This only saves time: without the file, the tracker is queried about every run again. The notes are
valid only for the sink's current options; if the options change, all runs are queried again.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class DeliveryNotes:
    """The ids of the completely recorded runs, each with the time at which the run ended."""

    def __init__(self, path: Path, options: str) -> None:
        """options: text that identifies the sink's options. Notes that have another text are
        discarded."""
        self._path = path
        self._options = options
        self._runs: dict[str, str] = {}
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if found["options"] == options:
                self._runs = {str(run): str(at) for run, at in found["runs"].items()}

    @property
    def runs(self) -> Mapping[str, str]:
        """The noted runs, each with the time at which it ended."""
        return self._runs

    def add(self, run_id: str, changed_at: str) -> None:
        """Note that a run is recorded completely. Disk errors are ignored."""
        self._runs[run_id] = changed_at
        self._write()

    def _write(self) -> None:
        temporary = self._path.with_name(self._path.name + ".new")
        with contextlib.suppress(OSError):
            text = json.dumps({"options": self._options, "runs": self._runs})
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(self._path)
