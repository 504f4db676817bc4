"""The training process of a run on the coordinator: reads jobs, trains, reports progress.

Run it as a module. Each job is a line of JSON on standard input, which is open as long as the
coordinator needs the process. The answers are lines of JSON on standard output: the progress, and
at the end of each job `done` or an error.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import traceback
from typing import Final, TextIO

from potluck.common.errors import PotluckError
from potluck.server.reduce.training_job import TrainingJob, carry_out

_GONE: Final = 4


def main() -> None:
    """Carry out jobs, until standard input is closed."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    # plug-ins may print, but the coordinator reads standard output
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    jobs: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(jobs,), daemon=True).start()
    while True:
        _carry_out(TrainingJob.model_validate_json(jobs.get()), answers)


def _carry_out(job: TrainingJob, answers: TextIO) -> None:
    try:
        carry_out(job, lambda share: _answer(answers, progress=share))
    except PotluckError as error:
        _answer(answers, error=error.message)
    except Exception as error:
        traceback.print_exc()  # the coordinator's log shows this output
        text = " ".join(str(error).split())
        _answer(answers, error=f"unexpected {type(error).__name__}: {text}")
    else:
        _answer(answers, done=True)


def _answer(answers: TextIO, **values: float | str) -> None:
    answers.write(json.dumps(values) + "\n")


def _read(jobs: queue.SimpleQueue[str]) -> None:
    """Queue the jobs. End the process immediately, even during a job, when the coordinator has
    ended or no longer needs the process."""
    for line in sys.stdin:
        jobs.put(line)
    os._exit(_GONE)


if __name__ == "__main__":
    main()
