"""Points at which a process that runs into them stops, or is killed, as a test wants.

What a process does at a point is said by files in the folder that POTLUCK_POINTS names:
`kill-POINT` (deleted, then SIGKILL), `die-POINT` (SIGKILL, each time), `raise-POINT` (deleted,
then ValueError) and `hold-POINT` (wait until it is gone). `at-POINT` is made whenever a point is
reached. So what is tested holds nothing made for tests.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

_LOOK_SECONDS = 0.005


def reach(point: str) -> None:
    """Say that this point is reached, and do there what the test wants."""
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
