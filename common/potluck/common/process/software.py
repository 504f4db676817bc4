"""Versions of the software that a process runs, for its records."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType

from potluck.common.net.build_version import software_version

_PACKAGES = ("numpy", "torch")
"""Packages whose versions can change the exact bits of a model."""


@cache
def software_versions() -> Mapping[str, str]:
    """Return the versions of Potluck, of Python, and of the installed packages in `_PACKAGES`."""
    found = {"potluck": software_version(), "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return MappingProxyType(found)
