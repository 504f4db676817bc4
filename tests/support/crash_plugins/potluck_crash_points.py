"""Points at which a test stops or kills a process.

Files in the folder POTLUCK_POINTS set what a process does at a point: `kill-POINT` (deleted, then
SIGKILL), `die-POINT` (SIGKILL, each time), `raise-POINT` (deleted, then ValueError) and
`hold-POINT` (wait until the file is deleted). A process that reaches a point creates `at-POINT`.
So the tested code contains nothing made for tests.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

_LOOK_SECONDS = 0.005


def reach(point: str) -> None:
    """Record that this point was reached, and do what the test has set."""
    folder = Path(os.environ["POTLUCK_POINTS"])
    (folder / f"at-{point}").touch()
    with contextlib.suppress(FileNotFoundError):
        (folder / f"kill-{point}").unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    if (folder / f"die-{point}").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    with contextlib.suppress(FileNotFoundError):
        (folder / f"raise-{point}").unlink()
        raise ValueError("as a test\nwants it")
    while (folder / f"hold-{point}").exists():
        time.sleep(_LOOK_SECONDS)
