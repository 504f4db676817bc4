"""The extra of Potluck that brings a library which is not installed.

Potluck alone brings what every machine needs. What only some need comes with an extra:
`potluck[server]`, `potluck[operator]`, `potluck[experiments]`, and one for each adapter.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Final

from potluck.common.errors import ConfigurationError

INSTALLING: Final = "docs/start/install.md"
"""The page on how Potluck and its extras are installed."""

_EXTRAS: Final = {
    "server": "potluck[server]",
    "client": "potluck[client]",
    "deploy": "potluck[operator]",
    "experiments": "potluck[experiments]",
    "federation": "potluck[notebook]",
    "page": "potluck[page]",
    "privacy": "potluck[privacy]",
}
"""Extra of each package of the product, for what it needs beside the common parts."""

_MODULES: Final = {
    "potluck.common.tables.table_files": "potluck[parquet]",
    "potluck.integrations.s3.store_requests": "potluck[s3]",
    "potluck.integrations.tracing.exporting": "potluck[tracing]",
    "potluck.integrations.s3.object_store": "potluck[s3]",
} | {
    f"potluck.integrations.adapters.{name}": f"potluck[{name}]"
    for name in ("lightning", "lora", "monai", "transformers")
}
"""Extra of each module that needs what only some machines or some tasks do."""

_ROOMS: Final = {"potluck.experiments.cluster": "potluck[experiments,ray]"}
"""Extras of rooms that need more than their package does."""


class MissingLibraryError(ConfigurationError, ModuleNotFoundError):
    """A library is not installed; its message names it and the extra that brings it."""


@contextmanager
def extra_named() -> Iterator[None]:
    """Around imports behind a door for Python: raises MissingLibraryError for what is missing.

    Commands need none: they say the same of whatever reaches them.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        line = missing_library(error)
        if line is None:
            raise
        raise MissingLibraryError(line) from error


def require(library: str, extra: str) -> None:
    """For a library that is imported only once it is needed, and should be missed before that.

    extra: `potluck[NAME]`, which brings it. Raises MissingLibraryError; nothing is imported.
    """
    if importlib.util.find_spec(library) is None:
        raise MissingLibraryError(not_installed(library, extra))


def not_installed(library: str, requirement: str) -> str:
    """Return one line that names a library which is not installed, and how to install it.

    requirement: what brings the library, such as `potluck[server]` or its own name. For an extra of
    Potluck the line never has pip look for `potluck` by name: a public index may hold another
    project of that name.
    """
    own = re.fullmatch(r"potluck(\[.+\])?", requirement)
    if own is None:
        return f"{library} is not installed; pip install '{requirement}'"
    return (
        f"{library} is not installed; in a checkout of Potluck: pip install '.{own[1] or ''}', "
        f"elsewhere: see {INSTALLING}"
    )


def missing_library(error: BaseException | None) -> str | None:
    """Return one line that names the library and the extra that brings it.

    None unless `error` is about a library that a module of Potluck imports and lacks.
    """
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return None
    module = _importer(error.__traceback__)
    importer = module.split(".")
    if importer[0] != "potluck" or error.name.startswith("potluck."):
        return None
    room = module.rpartition(".")[0]
    wanted = _MODULES.get(module) or _ROOMS.get(room) or _EXTRAS.get(importer[1], "potluck")
    library = error.name.partition(".")[0]
    return not_installed(library, wanted)


def _importer(trace: TracebackType | None) -> str:
    """Name of the module whose import failed."""
    name = ""
    while trace is not None:
        module = str(trace.tb_frame.f_globals.get("__name__", ""))
        if not module.startswith("importlib"):
            name = module
        trace = trace.tb_next
    return name
