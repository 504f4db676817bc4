"""The training process of the coordinator: reads a job, trains, reports progress.

Run it as a module. The job is a line of JSON on standard input, which is open as long as the
coordinator runs; when it is closed, the result is no longer needed. Progress and errors are lines
of JSON on standard output.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Final, TextIO

from potluck.common.errors import PotluckError
from potluck.server.reduce.training_job import TrainingJob, carry_out

FAILED: Final = 3
"""Exit code after a failure whose reason is in the last line of output."""
_GONE: Final = 4


def main() -> int:
    """Carry out one job; return the exit code."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    # plug-ins may print, but the coordinator reads standard output
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    job = TrainingJob.model_validate_json(sys.stdin.readline())
    threading.Thread(target=_leave_when_alone, daemon=True).start()
    try:
        carry_out(job, lambda share: _answer(answers, progress=share))
    except PotluckError as error:
        _answer(answers, error=error.message)
        return FAILED
    except Exception as error:
        text = " ".join(str(error).split())
        _answer(answers, error=f"unexpected {type(error).__name__}: {text}")
        raise
    return 0


def _answer(answers: TextIO, **values: float | str) -> None:
    answers.write(json.dumps(values) + "\n")


def _leave_when_alone() -> None:
    """End the process immediately when the coordinator has ended."""
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os._exit(_GONE)


if __name__ == "__main__":
    sys.exit(main())
