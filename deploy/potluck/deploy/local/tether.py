"""Runs a command that ends when its starter ends: `python tether.py GRACE_SECONDS COMMAND…`.

Standard input is a pipe. The starter holds the pipe's other end and never writes to it. When the
starter ends, even by SIGKILL, the kernel closes that end; the starter can also close it earlier.
Then the command gets SIGTERM, and SIGKILL if it still runs after the grace period.

This needs no support by the command and works on Linux and macOS. The alternative,
`prctl(PR_SET_PDEATHSIG)`, exists on Linux only, and acts when the *thread* that started the child
ends.

Imports the standard library only: it is run with `python -I -S`, which takes milliseconds.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading


def main() -> int:
    """Run the command. Return its exit code; 128 + N if signal N ended it, as in a shell."""
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
