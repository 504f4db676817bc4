"""The page on architecture, CONTRIBUTING.md and the pages on privacy agree with the tree."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.source_imports import SOURCE_ROOTS, packages, written_packages

HOUSE = Path(__file__).resolve().parents[3]
WALKS = ["docs/contributing/architecture.md", "docs/contributing/walks.md"]
PAGES = [*WALKS, "CONTRIBUTING.md"]
PRIVACY = [
    f"docs/{page}.md"
    for page in (
        "security/threat-model",
        "security/specification",
        "security/one-set",
        "security/label-counts",
        "security/updates",
        "security/other-parties",
        "privacy/profiles",
        "privacy/masked-updates",
    )
]

LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)[^)]*\)")
LABELLED = re.compile(r"\[`([^`]+)`\]\(([^)\s]+)\)")
QUOTED_PATH = re.compile(r"`(\.?[\w-]+/[\w./-]*|[\w-]+\.(?:md|toml|txt|yaml))`")
FUNCTIONS = re.compile(r"\]\(([^)\s]+\.py)\)((?:,?\s(?:and\s)?`\w+`)+)")


def linked(name: str) -> Iterator[Path]:
    """Yield the files and folders to which a page links."""
    for target in LINK.findall((HOUSE / name).read_text()):
        yield (HOUSE / name).parent / target


@pytest.mark.parametrize("name", [*PAGES, *PRIVACY])
def test_every_link_target_on_the_pages_exists(name: str) -> None:
    targets = list(linked(name))
    assert targets
    assert [str(target) for target in targets if not target.exists()] == []


def test_every_path_quoted_on_the_pages_exists() -> None:
    texts = [LABELLED.sub("", (HOUSE / name).read_text()) for name in PAGES]
    paths = {path for text in texts for path in QUOTED_PATH.findall(text)}
    assert len(paths) > 10
    assert sorted(path for path in paths if not (HOUSE / path).exists()) == []


@pytest.mark.parametrize("name", PAGES)
def test_every_link_label_occurs_in_its_target(name: str) -> None:
    links = LABELLED.findall((HOUSE / name).read_text())
    ends = [(label.rpartition("…/")[2].strip("/"), target) for label, target in links]
    assert [f"{end}: {target}" for end, target in ends if end not in target] == []


def test_every_function_on_the_pages_of_walks_is_in_its_file() -> None:
    text = "\n".join((HOUSE / name).read_text() for name in WALKS)
    named = [
        (target, function)
        for target, functions in FUNCTIONS.findall(text)
        for function in re.findall(r"\w+", functions.replace(" and ", " "))
    ]
    assert len(named) > 80
    missing = [
        f"{function} in {target}"
        for target, function in named
        if not re.search(rf"\bdef {function}\(", (HOUSE / "docs/contributing" / target).read_text())
    ]
    assert missing == []


def test_lists_of_source_roots_on_the_pages_are_complete() -> None:
    decision = (HOUSE / "docs/contributing/adr/0001-source-roots.md").read_text()
    [listed] = re.findall(r"Each source root \((.*?)\)", decision, re.DOTALL)
    rules = re.findall(r"Imports point one way: .*?\n\n", decision, re.DOTALL)
    assert re.findall(r"`(\w+)/`", listed) == list(SOURCE_ROOTS)
    assert set(re.findall(r"\w+", rules[0])) >= set(SOURCE_ROOTS)
    contributing = (HOUSE / "CONTRIBUTING.md").read_text()
    [paragraph] = re.findall(r"Imports point\sone way: .*?\n\n", contributing, re.DOTALL)
    assert set(re.findall(r"\w+", paragraph)) >= set(SOURCE_ROOTS)


def test_architecture_page_names_the_packages_missing_from_its_picture() -> None:
    text = (HOUSE / "docs/contributing/architecture.md").read_text()
    [paragraph] = re.findall(r"Not in the picture are .*?\n\n", text, re.DOTALL)
    links = {(HOUSE / "docs/contributing" / target).resolve() for target in LINK.findall(paragraph)}
    drawn = {room.parents[1] for room in HOUSE.glob("*/potluck/*/*/__init__.py")}
    assert set(packages()) - drawn - links == set()
    guests = {"integrations", "privacy", "secagg", "verifiable"}
    [named] = re.findall(r"the core\simports none of (.*?) \(", text)
    assert set(re.findall(r"`(\w+)`", named)) == guests
    assert guests < {folder.name for folder in written_packages()}


NAMED_FILE = re.compile(r"(?<![\w/.*{}<>$…-])((?:[\w.-]+/)*[\w-]+\.py|tests/[\w./-]*\w)(?![\w/(*])")
"""Pattern of a Python file's or a test's name, alone or with the folders that contain it."""
ROOTS = (*SOURCE_ROOTS, "benchmarks", "examples", "tests", "tools")


def remarks(module: Path) -> Iterator[str]:
    """Yield the docstrings and comments of a module."""
    text = module.read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node, clean=False) or ""
    if "#" in text:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield token.string


def test_every_file_named_in_a_docstring_or_comment_exists() -> None:
    modules = [m for root in ROOTS for m in (HOUSE / root).rglob("*.py") if "_pb2" not in m.name]
    known = {ending for module in modules for ending in endings(module.relative_to(HOUSE))}
    missing = {
        f"{module.relative_to(HOUSE)}: {name}"
        for module in modules
        if NAMED_FILE.search(module.read_text())  # most modules name none, so skip parsing them
        for remark in remarks(module)
        for name in NAMED_FILE.findall(remark)
        if name not in known and not (HOUSE / name).exists()
    }
    assert sorted(missing) == []
    assert "server/machine/machine.py" in known


def endings(path: Path) -> Iterator[str]:
    """Yield the forms in which a path may be written: with all its folders, or without some of the
    first ones."""
    for start in range(len(path.parts)):
        yield "/".join(path.parts[start:])


def test_every_test_file_named_on_a_page_exists() -> None:
    pages = [*(HOUSE / "docs").rglob("*.md"), HOUSE / "README.md", HOUSE / "CONTRIBUTING.md"]
    named = {
        (page.name, name)
        for page in pages
        for name in re.findall(r"tests/[\w./-]*\w", page.read_text())
    }
    assert len(named) > 20
    assert sorted(each for each in named if not (HOUSE / each[1]).exists()) == []


def test_pages_agree_on_the_size_of_an_installation() -> None:
    sizes = {
        name: re.findall(r"[\d.]+ GB", (HOUSE / name).read_text())
        for name in ("README.md", "CONTRIBUTING.md", "Makefile")
    }
    assert {name: set(found) for name, found in sizes.items()} == {
        "README.md": {"1 GB", "3.2 GB"},  # sizes for the demo, and for everything
        "CONTRIBUTING.md": {"1 GB", "3.2 GB"},
        "Makefile": {"3.2 GB"},
    }
