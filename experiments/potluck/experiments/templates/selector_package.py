"""Writes the package of a new selector from its templates."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from string import Template

from potluck.common.errors import ConfigurationError, StorageError
from potluck.common.settings import plugins

LONGEST_NAME = 40
"""Maximum number of characters of a new selector's name."""

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", re.ASCII)
_FILES = {
    "pyproject.toml": "pyproject.toml",
    "selector.py": "$module.py",
    "test_selector.py": "tests/test_$module.py",
    "README.md": "README.md",
    "profiles.json": "profiles.json",
    "grid.toml": "grid.toml",
}
"""Path in the new package by the name of its template, whose file has `.txt` added to the name."""


def write_selector_package(name: str, into: Path) -> Path:
    """Write the package of a new selector. Return its folder, `NAME-selector` in `into`.

    name: the selector's name in run files, such as `rare-first`.

    Raises ConfigurationError if the name is not valid or is already installed, or if the folder
    exists; StorageError if it can't be written.
    """
    _check_name(name)
    values = _values(name)
    folder = into / values["package"]
    if folder.exists():
        raise ConfigurationError(
            f"{folder} exists already; choose another name, or another folder with --into",
            path=folder,
        )
    try:
        folder.mkdir(parents=True)
        (folder / "tests").mkdir()
        templates = resources.files("potluck.experiments.templates").joinpath("selector")
        for template, path in _FILES.items():
            text = templates.joinpath(f"{template}.txt")
            filled = Template(text.read_text(encoding="utf-8")).substitute(values)
            (folder / Template(path).substitute(values)).write_text(filled, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"can't write {folder}: {error.strerror}", path=folder) from None
    return folder


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name) or len(name) > LONGEST_NAME:
        raise ConfigurationError(
            f"'{name}' is not a valid name of a selector; use at most {LONGEST_NAME} lower-case "
            "letters, digits and single hyphens, a letter first, such as rare-first",
            name=name,
        )
    if name in plugins.installed(plugins.SELECTORS):
        raise ConfigurationError(
            f"a selector '{name}' is installed already; choose another name", name=name
        )


def _values(name: str) -> dict[str, str]:
    """Return the texts that replace the templates' placeholders."""
    package = f"{name}-selector"
    words = package.split("-")
    return {
        "name": name,
        "package": package,
        "module": "_".join(words),
        "title": name.replace("-", " ").capitalize(),
        "cls": "".join(word.capitalize() for word in words),
    }
