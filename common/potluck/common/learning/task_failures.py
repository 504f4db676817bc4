"""Failures in the code of a task, as errors that name it."""

from __future__ import annotations

import contextlib
import signal
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path

from potluck.common.errors import DeviceMemoryError, PotluckError, TrainerError, TrainingError


@contextlib.contextmanager
def blamed_on_task(task: str, whose: str) -> Iterator[None]:
    """A file that the code of a task can't read is its failure, not that of a disk of ours.

    `whose`: the data it is at, for people. Raises TrainingError in place of OSError.
    """
    try:
        yield
    except OSError as error:
        cause = error.strerror or " ".join(str(error).split()) or type(error).__name__
        file = f"{error.filename}: " if error.filename is not None else ""
        raise TrainingError(
            f"task '{task}' failed at {whose}: {file}{cause}; see that the files it needs are "
            "where it looks for them, whole and readable",
            task=task,
            file=error.filename,
        ) from error


def crashed(error: BaseException) -> TrainingError:
    """An exception that nobody foresaw, in one line, with the place it came from."""
    frame = traceback.extract_tb(error.__traceback__)[-1:]
    where = f" at {Path(frame[0].filename).name}:{frame[0].lineno}" if frame else ""
    text = " ".join(str(error).split())[:500]
    return TrainingError(
        f"{type(error).__name__}{where}: {text or 'no message'}; see that the task fits its data"
    )


@contextlib.contextmanager
def blamed_on_trainer(task: str, whose: str) -> Iterator[None]:
    """Raise a TrainerError, one line, in place of what a task's own trainer raises.

    Errors of ours go through, as does an OSError, which `blamed_on_task` explains. Raises
    DeviceMemoryError where a GPU has too little memory.
    """
    try:
        yield
    except (PotluckError, OSError):
        raise
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        if isinstance(error, KeyboardInterrupt) and _comes_of_a_signal():
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(str(error).split())[:300] or "no message"
        kind = type(error).__name__
        cls = DeviceMemoryError if kind == "OutOfMemoryError" else TrainerError
        raise cls(
            f"the trainer of task '{task}' failed at {whose}: {kind}: {text} "
            f"({Path(frame.filename).name}:{frame.lineno})"
        ) from error


def _comes_of_a_signal() -> bool:
    """Return whether Ctrl-C raises KeyboardInterrupt here: in no other thread, and in none if
    another handler takes the signal."""
    main = threading.current_thread() is threading.main_thread()
    return main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
