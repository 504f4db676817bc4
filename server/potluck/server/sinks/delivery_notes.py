"""The runs that a sink has wholly, so that a restart need not ask the tracker about each.

Only a convenience: without the file every run is asked about once more. It counts for the options
that the sink had then; another place to record to is asked about all runs.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class DeliveryNotes:
    """Runs by id, each with when it came into the state that it ended in."""

    def __init__(self, path: Path, options: str) -> None:
        """options: by which the sink's are known; notes made with others are forgotten."""
        self._path = path
        self._options = options
        self._runs: dict[str, str] = {}
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if found["options"] == options:
                self._runs = {str(run): str(at) for run, at in found["runs"].items()}

    @property
    def runs(self) -> Mapping[str, str]:
        """The runs that are noted."""
        return self._runs

    def add(self, run_id: str, changed_at: str) -> None:
        """A run is recorded to its end. A disk that refuses costs nothing but the convenience."""
        self._runs[run_id] = changed_at
        self._write()

    def _write(self) -> None:
        temporary = self._path.with_name(self._path.name + ".new")
        with contextlib.suppress(OSError):
            text = json.dumps({"options": self._options, "runs": self._runs})
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(self._path)
