"""The version of this build: the next release, and the commit that the build was made from.

The build of a wheel runs this file alone to compute the version (see `pyproject.toml`), so it
imports only the standard library.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

RELEASE = "0.1.0"
"""Version of the next release; the released commit will get the tag `v` + RELEASE."""

VERSION_VARIABLE = "POTLUCK_BUILD_VERSION"
"""Environment variable that sets the version when a wheel is built from sources without git."""

_ROOT = Path(__file__).resolve().parents[4]
SOURCE_ROOTS = (
    "api",
    "client",
    "common",
    "deploy",
    "experiments",
    "integrations",
    "page",
    "privacy",
    "relay",
    "secagg",
    "server",
    "verifiable",
)
"""Folders that the digest of the sources includes."""

_PACKAGES = ("numpy", "torch")
"""Packages whose versions can change the exact bits of a model."""
_DIGITS = 9
_GIT_SECONDS = 20


@cache
def software_version() -> str:
    """Return the version of the build that this process runs. In a checkout, the first call asks
    git.

    An editable install has the version with which it was installed, which is wrong after the next
    commit. So the installed version is not used in a checkout.
    """
    if (_ROOT / "pyproject.toml").is_file():
        return source_version(_ROOT)
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("potluck")
    except PackageNotFoundError:
        return f"{RELEASE}.dev0+unknown"


@cache
def software_versions() -> Mapping[str, str]:
    """Return the versions of Potluck, of Python, and of the installed packages in `_PACKAGES`."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"potluck": software_version(), "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return MappingProxyType(found)


def wheel_version() -> str:
    """Return the version of a wheel that is built now from these sources."""
    return os.environ.get(VERSION_VARIABLE) or source_version(_ROOT)


def source_version(root: Path) -> str:
    """Return the version of the sources in a folder, from git, or else from a digest of the files.

    Returns RELEASE at its tag, and `RELEASE.devN+gHASH` after N commits (N = 0 in a clone without
    history). `.dirty` is added if files differ from the commit. Without git, returns
    `RELEASE.dev0+sHASH`.
    """
    if (root / ".git").exists():
        try:
            return _git_version(root)
        except (OSError, subprocess.SubprocessError):
            pass  # git is missing, or refuses a folder that belongs to another user
    return f"{RELEASE}.dev0+s{_digest(root)}"


def _git_version(root: Path) -> str:
    commit = _git(root, "rev-parse", f"--short={_DIGITS}", "HEAD")
    dirty = bool(_git(root, "status", "--porcelain", "--untracked-files=no"))
    if not dirty and f"v{RELEASE}" in _git(root, "tag", "--points-at", "HEAD").splitlines():
        return RELEASE
    shallow = _git(root, "rev-parse", "--is-shallow-repository") == "true"
    number = "0" if shallow else _git(root, "rev-list", "--count", "HEAD")
    return f"{RELEASE}.dev{number}+g{commit}{'.dirty' if dirty else ''}"


def _git(root: Path, *arguments: str) -> str:
    # Git sets these variables while it runs a hook; they could name another repository.
    environment = {name: value for name, value in os.environ.items() if name[:4] != "GIT_"}
    done = subprocess.run(
        ["git", "-C", str(root), *arguments],
        env=environment | {"GIT_OPTIONAL_LOCKS": "0"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
        timeout=_GIT_SECONDS,
    )
    return done.stdout.strip()


def _digest(root: Path) -> str:
    hasher = hashlib.sha256()
    for path in sorted(_files(root)):
        contents = path.read_bytes()
        hasher.update(f"{path.relative_to(root).as_posix()}\0{len(contents)}\0".encode())
        hasher.update(contents)
    return hasher.hexdigest()[:_DIGITS]


def _files(root: Path) -> Iterable[Path]:
    for folder in SOURCE_ROOTS:
        for path in (root / folder / "potluck").rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path


if __name__ == "__main__":
    sys.stdout.write(f"{wheel_version()}\n")
