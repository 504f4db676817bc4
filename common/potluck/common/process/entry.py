"""Starts the programs. Imports only the standard library, so that it loads fast.

Importing the rest takes a second or more. Ctrl-C during this time ends the program without a
traceback.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from typing import NoReturn

INTERRUPTED = 130
WINDOWS = (
    "Potluck does not run on Windows, which lacks file locks, signals and process groups that "
    "Potluck needs; use WSL2 or a Linux container"
)


def begin(module: str) -> NoReturn:
    """Import `module` and call its `main`; Ctrl-C at any time ends the process without a
    traceback."""
    if sys.platform == "win32":
        sys.exit(f"potluck: {WINDOWS}")
    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # False under nohup
    try:
        if heeded:
            signal.signal(signal.SIGINT, _end)
        program = importlib.import_module(module)
        if heeded:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        program.main()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    finally:
        if heeded:
            signal.signal(signal.SIGINT, _end)
    sys.exit(0)


def _end(*_: object) -> NoReturn:
    """End the process immediately.

    An exception in the middle of an import might be swallowed or wrapped. Ending at once is safe:
    no work that could be lost has started yet.
    """
    os._exit(INTERRUPTED)
