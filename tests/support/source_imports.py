"""The source roots, their packages, and the imports of their modules, read from the sources."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from support.repository import ROOT

import house_figures

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
GENERATED = "rpc"
"""Package of generated stubs."""

Statement = ast.Import | ast.ImportFrom | ast.ClassDef


def packages() -> list[Path]:
    """Return the packages directly under `potluck`, from all source roots."""
    return sorted(
        folder
        for root in SOURCE_ROOTS
        for folder in (ROOT / root / "potluck").iterdir()
        if folder.is_dir() and folder.name != "__pycache__"
    )


def written_packages() -> list[Path]:
    """Return the packages without the generated stubs."""
    return [folder for folder in packages() if folder.name != GENERATED]


@cache
def statements(source: str) -> list[Statement]:
    """Return the imports and classes of a module, at any depth; cached, as most tests use them."""
    found = house_figures.statements(ast.parse(source))
    return [node for node in found if isinstance(node, Statement)]


def imported_names(source: str, package: str) -> Iterator[str]:
    """Yield the absolute names that a module of `package` imports, relative imports resolved.

    `from a import b` yields `a.b`, since `b` may be a module.
    """
    yield from names_imported_by(statements(source), package)


def names_imported_by(nodes: Iterable[Statement], package: str) -> Iterator[str]:
    """Yield the absolute names that these statements of a module of `package` import."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            anchor = parents[: len(parents) - node.level + 1] if node.level else []
            origin = ".".join([*anchor, *([node.module] if node.module else [])])
            yield from (f"{origin}.{alias.name}" for alias in node.names)


@cache
def imports_by_module() -> dict[str, set[str]]:
    """Return the product modules that each module imports, at any depth, by importing module.

    An `__init__.py` has the name of its package. Generated stubs are omitted.
    """
    sources: dict[str, str] = {}
    parents: dict[str, str] = {}
    for folder in written_packages():
        for path in folder.rglob("*.py"):
            dotted = ".".join(path.relative_to(folder.parents[1]).with_suffix("").parts)
            name = dotted.removesuffix(".__init__")
            sources[name] = path.read_text()
            parents[name] = dotted.rpartition(".")[0]
    found: dict[str, set[str]] = {}
    for name, source in sources.items():
        names = set(imported_names(source, parents[name]))
        modules = {full if full in sources else full.rpartition(".")[0] for full in names}
        found[name] = {module for module in modules if module in sources} - {name}
    return found
