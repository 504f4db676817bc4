"""Kill points at every change that a process makes to persistent state.

A change is a transaction of the store that wrote something, or a file that is synced, renamed or
deleted. While the folder that POTLUCK_POINTS names has a file `boundaries`, each change adds a
line to it: `commit_round-2` is the second change of that name. `before-…` and `after-…` its name
are points. The tested code is unchanged: this module wraps the functions that it calls.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import stat
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Engine, event

from potluck.server.store import Store

WITNESSED: Final = "POTLUCK_BOUNDARIES"
"""Environment variable that names the watched program, e.g. `potluck-server`."""

_UNRELATED: Final = {"see_clients"}
"""Changes that do not belong to a run: they occur whenever a host connects."""

_AROUND: Final = {"open", "close", "patiently"}
"""Methods that do not count as changes: they call other methods, or change nothing."""

_STATE: Final = re.compile(r"coordinator|host-[0-9]+|gate|\.?backup(\.[0-9a-f]+)?")
"""Names of the folders in which processes keep their state, and of backups."""

_lock = threading.Lock()
_here = threading.local()


def watch(reach: Callable[[str], None]) -> None:
    """Make each change on disk a kill point from now on, if this is the watched program."""
    if os.environ.get(WITNESSED) != Path(sys.argv[0]).name:
        return
    _watch_store(reach)
    _watch_files(reach)


def _numbered(name: str) -> str | None:
    """Note a change and return its numbered name; None while changes are not noted."""
    path = Path(os.environ["POTLUCK_POINTS"]) / "boundaries"
    with _lock, contextlib.suppress(FileNotFoundError), path.open("r+") as file:
        before = sum(line.rpartition("-")[0] == name for line in file)
        file.write(f"{name}-{before + 1}\n")
        return f"{name}-{before + 1}"
    return None


# The store ------------------------------------------------------------------------------------


def _watch_store(reach: Callable[[str], None]) -> None:
    for name in dir(Store):
        method = getattr(Store, name)
        if not name.startswith("_") and callable(method) and name not in _AROUND:
            setattr(Store, name, _in_method(name, method, reach))

    @event.listens_for(Engine, "before_cursor_execute")
    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if statement.startswith(("INSERT", "UPDATE", "DELETE")):
            _here.writes = True

    @event.listens_for(Engine, "commit")
    def commits(_connection: object) -> None:
        name = getattr(_here, "method", None)
        if name is None or name in _UNRELATED or not getattr(_here, "writes", False):
            return
        _here.boundary = _numbered(name)
        if _here.boundary is not None:
            reach(f"before-{_here.boundary}")


def _in_method(
    name: str, method: Callable[..., Any], reach: Callable[[str], None]
) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*arguments: Any, **options: Any) -> Any:
        outer = getattr(_here, "method", None)
        _here.method, _here.writes, _here.boundary = outer or name, False, None
        try:
            result = method(*arguments, **options)
            if _here.boundary is not None:
                reach(f"after-{_here.boundary}")
            return result
        finally:
            _here.method, _here.writes, _here.boundary = outer, False, None

    return call


# Files ----------------------------------------------------------------------------------------


def _watch_files(reach: Callable[[str], None]) -> None:
    def watched(verb: str, change: Callable[..., Any], kind: Callable[..., str]) -> Any:
        @functools.wraps(change)
        def call(*arguments: Any, **options: Any) -> Any:
            what = "" if getattr(_here, "inside", False) else kind(*arguments, **options)
            boundary = _numbered(f"{verb}-{what}") if what else None
            if boundary is None:
                return change(*arguments, **options)
            reach(f"before-{boundary}")
            _here.inside = True  # count a folder as one change, not each of its files
            try:
                result = change(*arguments, **options)
            finally:
                _here.inside = False
            reach(f"after-{boundary}")
            return result

        return call

    os.replace = watched("rename", os.replace, lambda _source, target, **_: _kind(target))
    os.rename = watched("rename", os.rename, lambda _source, target, **_: _backup(target))
    os.unlink = watched("delete", os.unlink, _deleted)
    os.fsync = watched("sync", os.fsync, _kind_of_descriptor)
    shutil.rmtree = watched("delete", shutil.rmtree, _deleted)


def _backup(path: Any) -> str:
    return _kind(path) if Path(path).name == "backup" else ""


def _deleted(path: Any, **_: Any) -> str:
    return _kind(path) if os.path.lexists(path) else ""


def _kind(path: Any) -> str:
    """Return the part of the state directory a path belongs to; "" if outside it."""
    parts = Path(os.fsdecode(path)).absolute().parts
    places = [place for place, part in enumerate(parts) if _STATE.fullmatch(part)]
    if not places:
        return ""
    place = places[-1]
    folder = parts[place + 1] if place + 2 < len(parts) else "state"
    suffixes = "".join(Path(parts[-1]).suffixes)
    return f"{folder}{suffixes if not parts[-1].startswith('.') else '.new'}"


def _kind_of_descriptor(descriptor: Any) -> str:
    number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
    if stat.S_ISDIR(os.fstat(number).st_mode):
        return ""  # no effect: a kill loses no file name
    return _kind(Path(f"/proc/self/fd/{number}").readlink())
