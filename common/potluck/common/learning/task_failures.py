"""One-line messages about failures in the code of tasks and other plug-ins."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType

from potluck.common.errors import DeviceMemoryError, PotluckError, TrainerError, TrainingError

_INSTALLED = {"site-packages", "dist-packages"}


@contextlib.contextmanager
def blamed_on_task(task: str, whose: str) -> Iterator[None]:
    """Raise TrainingError in place of an OSError in the block: the task's code could not read a
    file.

    whose: description of the data that the task processes, for the message.
    """
    try:
        yield
    except OSError as error:
        cause = error.strerror or " ".join(str(error).split()) or type(error).__name__
        file = f"{error.filename}: " if error.filename is not None else ""
        raise TrainingError(
            f"task '{task}' failed for {whose}: {file}{cause}; check that the task's files "
            "exist, are complete and can be read",
            task=task,
            file=error.filename,
        ) from error


def crashed(error: BaseException) -> TrainingError:
    """Return a TrainingError with one line that names an unexpected exception and where it was
    raised, in the user's own code if possible."""
    places = _places(error)
    where = f" at {_shown(*places[-1])}" if places else ""
    text = " ".join(str(error).split())[:500]
    return TrainingError(
        f"{type(error).__name__}{where}: {text or 'no message'}; check the task's code and data"
    )


@contextlib.contextmanager
def blamed_on_trainer(task: str, whose: str) -> Iterator[None]:
    """Raise a TrainerError with a one-line message in place of an exception from a task's own
    trainer.

    Errors of Potluck pass through, as does an OSError, which `blamed_on_task` explains. Raises
    DeviceMemoryError if a GPU has too little memory.
    """
    try:
        yield
    except (PotluckError, OSError):
        raise
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        if isinstance(error, KeyboardInterrupt) and _comes_of_a_signal():
            raise
        frame, line = _places(error)[-1]
        out_of_memory = type(error).__name__ == "OutOfMemoryError"
        cls = DeviceMemoryError if out_of_memory else TrainerError
        raise cls(
            f"the trainer of task '{task}' failed for {whose}: {_in_words(error, frame, line)}"
        ) from error


def _comes_of_a_signal() -> bool:
    """Return whether a KeyboardInterrupt here can come from Ctrl-C.

    It can only in the main thread, and only if Python's default handler is installed.
    """
    main = threading.current_thread() is threading.main_thread()
    return main and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def plugin_failure(
    error: BaseException, plugins: Mapping[str, object], round_number: int | None = None
) -> str:
    """Return one line that names the plug-in whose code raised the error, the method, file and
    line.

    Returns an empty text if no plug-in's code raised it. The file and line are the innermost ones
    in the plug-in's own package.

    plugins: plug-ins by their name in the message, e.g. "selector 'uniform'".
    """
    if isinstance(error.__cause__, StopIteration):
        error = error.__cause__
    frames = list(traceback.walk_tb(error.__traceback__))
    for belongs in (
        _is_method_of,
        _is_beside,
    ):  # methods first: several plug-ins may share a function
        for place, (frame, _) in enumerate(frames):
            for name, plugin in plugins.items():
                if belongs(plugin, frame):
                    own = [each for each in frames[place:] if _is_beside(plugin, each[0])]
                    if isinstance(error, OSError) and own[-1:] != frames[-1:]:
                        return ""  # reading a file failed in Potluck's code, not in the plug-in's
                    words = _in_words(error, *(own or frames[place:])[-1])
                    of_round = "" if round_number is None else f" of round {round_number}"
                    return f"{name} failed in {frame.f_code.co_name}{of_round}: {words}"
    return ""


def _is_method_of(plugin: object, frame: FrameType) -> bool:
    code = frame.f_code
    first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    return first is plugin and callable(getattr(type(plugin), code.co_name, None))


def _is_beside(plugin: object, frame: FrameType) -> bool:
    """Return whether a frame runs code of the plug-in's package (for Potluck's own
    plug-ins: of its subpackage)."""
    modules = [type(plugin).__module__, str(frame.f_globals.get("__name__", ""))]
    parts = [module.split(".") for module in modules]
    homes = [each[: 3 if each[0] == "potluck" else 1] for each in parts]
    return homes[0] == homes[1]


def _in_words(error: BaseException, frame: FrameType, line: int) -> str:
    """Return a text with the exception and the place where it was raised."""
    text = " ".join(str(error).split())[:300] or "no message"
    return f"{type(error).__name__}: {text} ({_shown(frame, line)})"


def _shown(frame: FrameType, line: int) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{line}"


def _places(error: BaseException) -> list[tuple[FrameType, int]]:
    """Return the frames and lines of an error, outermost first.

    Only those of the user's own code, if there are any: a line of numpy explains nothing.
    """
    places = list(traceback.walk_tb(error.__traceback__))
    return [place for place in places if _is_users_code(place[0])] or places


def _is_users_code(frame: FrameType) -> bool:
    """Return False for code of Potluck, Python's standard library and installed packages."""
    root = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    if root == "potluck" or root in sys.stdlib_module_names:
        return False
    return _INSTALLED.isdisjoint(Path(frame.f_code.co_filename).parts)
