"""Modules that pages, notebooks and examples import have types in an installed Potluck."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from support.doc_pages import NOTEBOOKS, blocks
from support.repository import ROOT

from notebook_files import code_of

ROOTS = [folder.parent for folder in ROOT.glob("*/potluck")]


def imported(code: str) -> Iterator[str]:
    """Yield the modules of Potluck from which some code imports."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("potluck."):
            yield node.module or ""


def folder_of(name: str) -> Path:
    """Return the folder of the package that a name (a package, a module or a class) is or belongs
    to."""
    path = Path(*name.split("."))
    while True:
        for root in ROOTS:
            if (root / path).is_dir():
                return root / path
            if (root / path).with_suffix(".py").is_file():
                return (root / path).parent
        path = path.parent


def test_every_subpackage_imported_by_pages_and_examples_is_typed() -> None:
    """A marker `py.typed` at the top is not enough: below a namespace package, pyright looks for
    one next to the imported module."""
    codes = [block.text for block in blocks("python")]
    codes += [code_of(path.read_text()) for path in NOTEBOOKS]
    codes += [path.read_text() for path in (ROOT / "examples").glob("*/*.py")]
    names = {name for code in codes for name in imported(code)}
    for page in (ROOT / "docs/reference/api").glob("*.md"):
        names |= set(re.findall(r"^::: ([\w.]+)", page.read_text(), re.MULTILINE))
    folders = {folder_of(name) for name in names}
    assert len(folders) > 10
    untyped = [folder for folder in folders if not (folder / "py.typed").is_file()]
    assert sorted(str(folder.relative_to(ROOT)) for folder in untyped) == []
