"""Runs a command that ends when its starter does: `python tether.py GRACE_SECONDS COMMAND…`.

Standard input is a pipe whose other end the starter holds and never writes to. When the starter
closes it, or ends in whatever way (the kernel then closes it, after SIGKILL too), the command gets
SIGTERM, and SIGKILL if it is still there after the grace period. That needs nothing of the command
and works on Linux and macOS alike; `prctl(PR_SET_PDEATHSIG)` exists on Linux only, and is bound to
the *thread* that started the child.

Imports the standard library only: it is run with `python -I -S`, which takes milliseconds.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading


def main() -> int:
    """The command's exit code; 128 + N if signal N ended it, as in a shell."""
    grace_seconds, command = float(sys.argv[1]), sys.argv[2:]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    ended = threading.Event()

    def end_with_starter() -> None:
        while os.read(0, 1024):
            pass
        child.terminate()
        if not ended.wait(grace_seconds):
            child.kill()

    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    threading.Thread(target=end_with_starter, daemon=True).start()
    code = child.wait()
    ended.set()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
