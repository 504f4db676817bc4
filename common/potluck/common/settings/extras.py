"""Error messages for missing libraries, which name the extra of Potluck that installs them.

`potluck` without extras installs the libraries that every machine needs. Extras install libraries
that only some machines need: `potluck[server]`, `potluck[operator]`, `potluck[experiments]`, and
one for each adapter.
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
"""The page about installing Potluck and its extras."""

_EXTRAS: Final = {
    "server": "potluck[server]",
    "client": "potluck[client]",
    "deploy": "potluck[operator]",
    "experiments": "potluck[experiments]",
    "federation": "potluck[notebook]",
    "page": "potluck[page]",
    "privacy": "potluck[privacy]",
}
"""For each of Potluck's packages, the extra that installs its additional libraries."""

_MODULES: Final = {
    "potluck.common.tables.table_files": "potluck[parquet]",
    "potluck.integrations.s3.store_requests": "potluck[s3]",
    "potluck.integrations.tracing.exporting": "potluck[tracing]",
    "potluck.integrations.s3.object_store": "potluck[s3]",
} | {
    f"potluck.integrations.adapters.{name}": f"potluck[{name}]"
    for name in ("lightning", "lora", "monai", "transformers")
}
"""For each module whose libraries only some machines or some tasks need, the extra that installs
them."""

_ROOMS: Final = {"potluck.experiments.cluster": "potluck[experiments,ray]"}
"""For each subpackage that needs more libraries than its package, the extras that install them."""


class MissingLibraryError(ConfigurationError, ModuleNotFoundError):
    """A library is not installed. The message names the library and the extra that installs it."""


@contextmanager
def extra_named() -> Iterator[None]:
    """Raise MissingLibraryError if an import in the block fails because a library is missing.

    Use it around the imports of a public Python module. Commands don't need this: they print the
    same message for every such error.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        line = missing_library(error)
        if line is None:
            raise
        raise MissingLibraryError(line) from error


def require(library: str, extra: str) -> None:
    """Raise MissingLibraryError if a library is missing. Use it for libraries that are imported
    late.

    extra: the extra that installs the library, such as `potluck[NAME]`. Nothing is imported.
    """
    if importlib.util.find_spec(library) is None:
        line = not_installed(library, extra)
        raise MissingLibraryError(line, library=library, requirement=extra)


def not_installed(library: str, requirement: str) -> str:
    """Return one line that names a missing library and the command to install it.

    requirement: the requirement that installs the library, such as `potluck[server]` or the
    library's own name. For an extra of Potluck, the command never makes pip search for `potluck` by
    name: a public index may have another project of that name.
    """
    own = re.fullmatch(r"potluck(\[.+\])?", requirement)
    if own is None:
        return f"{library} is not installed; pip install '{requirement}'"
    return (
        f"{library} is not installed; in a checkout of Potluck: pip install '.{own[1] or ''}', "
        f"elsewhere: see {INSTALLING}"
    )


def missing_library(error: BaseException | None) -> str | None:
    """Return one line that names the missing library and the extra that installs it.

    Return None unless `error` is about a missing library that a module of Potluck imports.
    """
    missing = _missing(error)
    return None if missing is None else not_installed(*missing)


def missing_extra(error: BaseException | None) -> str | None:
    """Return the name of the extra, such as "operator", that installs a missing library.

    Return None where `missing_library` does, and for a library that Potluck needs without extras.
    """
    missing = _missing(error)
    found = missing and re.fullmatch(r"potluck\[(.+)\]", missing[1])
    return found[1] if found else None


def _missing(error: BaseException | None) -> tuple[str, str] | None:
    """Return a missing library and the requirement that installs it."""
    if isinstance(error, MissingLibraryError):
        if "requirement" in error.metadata:  # raised by `require`
            return error.metadata["library"], error.metadata["requirement"]
        return _missing(error.__cause__)
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return None
    module = _importer(error.__traceback__)
    importer = module.split(".")
    if importer[0] != "potluck" or error.name.startswith("potluck."):
        return None
    room = module.rpartition(".")[0]
    wanted = _MODULES.get(module) or _ROOMS.get(room) or _EXTRAS.get(importer[1], "potluck")
    library = error.name.partition(".")[0]
    return library, wanted


def _importer(trace: TracebackType | None) -> str:
    """Return the name of the module that contains the failed import."""
    name = ""
    while trace is not None:
        module = str(trace.tb_frame.f_globals.get("__name__", ""))
        if not module.startswith("importlib"):
            name = module
        trace = trace.tb_next
    return name
