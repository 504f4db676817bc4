"""Failures in the code of a task, as errors that name it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from potluck.common.errors import TrainingError


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
