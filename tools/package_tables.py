"""Generate the tables of packages in CONTRIBUTING.md and docs/contributing/architecture.md.

    .venv/bin/python tools/package_tables.py

rewrites both tables. A source root is a folder that contains a folder `potluck`. A package is a
folder in `potluck` with Python files, and a subpackage is a folder in a package with Python files.
The table on the architecture page shows the first sentence of each subpackage's docstring.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

HOUSE = Path(__file__).resolve().parents[1]

BEGIN, END = "<!-- packages -->\n", "<!-- /packages -->"
MARKED = re.compile(f"{BEGIN}.*{END}", re.DOTALL)
GENERATED = "rpc"
"""Package of generated stubs; its subfolders are versions, not subpackages."""


def source_roots() -> list[str]:
    """Return the names of the folders that contain a part of the namespace package `potluck`."""
    return sorted(folder.parent.name for folder in HOUSE.glob("*/potluck"))


def subfolders(folder: Path) -> list[Path]:
    """Return the subfolders with Python files, sorted by name."""
    return sorted(f for f in folder.iterdir() if f.is_dir() and any(f.rglob("*.py")))


def packages() -> Iterator[tuple[str, Path]]:
    """Yield each package with its source root; the package named like the root is first."""
    for root in source_roots():
        found = subfolders(HOUSE / root / "potluck")
        for package in sorted(found, key=lambda folder: (folder.name != root, folder.name)):
            yield root, package


def subpackages(package: Path) -> list[Path]:
    """Return the subpackages of a package; none for generated stubs."""
    return [] if package.name == GENERATED else subfolders(package)


def summary(folder: Path) -> str:
    """Return the first sentence of a package's docstring; empty if it has none."""
    module = folder / "__init__.py"
    text = ast.get_docstring(ast.parse(module.read_text())) if module.is_file() else None
    paragraph = " ".join((text or "").partition("\n\n")[0].split())
    return re.split(r"(?<=\.)\s", paragraph)[0]


def short_table() -> str:
    """Return a table with one row per package, and the names of its subpackages."""
    lines = ["| source root | package | subpackages |", "|---|---|---|"]
    for root, package in packages():
        inside = ", ".join(f"`{folder.name}`" for folder in subpackages(package))
        lines.append(f"| `{root}/` | `{package.name}` | {inside or 'modules only'} |")
    return "\n".join(lines) + "\n"


def long_table() -> str:
    """Return a table with one row per subpackage and per package with a docstring or without
    subpackages, and its summary."""
    lines = ["| where | what is in it |", "|---|---|"]
    for root, package in packages():
        inside = subpackages(package)
        for folder in [package, *inside] if summary(package) or not inside else inside:
            path = folder.relative_to(HOUSE).as_posix()
            label = f"{root}/…/{'/'.join(folder.parts[len(package.parts) - 1 :])}"
            text = "generated stubs" if package.name == GENERATED else summary(folder)
            lines.append(f"| [`{label}`](../../{path}) | {text} |")
    return "\n".join(lines) + "\n"


def filled(text: str, table: str) -> str:
    """Return the text of a page with the table between its marks."""
    return MARKED.sub(lambda _: f"{BEGIN}{table}{END}", text)


TABLES = {"CONTRIBUTING.md": short_table, "docs/contributing/architecture.md": long_table}

if __name__ == "__main__":
    for name, table in TABLES.items():
        (HOUSE / name).write_text(filled((HOUSE / name).read_text(), table()))
