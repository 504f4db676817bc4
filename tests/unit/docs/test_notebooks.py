"""The notebooks are stored without outputs, have valid links and are linked from the docs."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
from support.doc_pages import NOTEBOOKS
from support.repository import ROOT

from notebook_files import cleaned, code_of, markdown_of

LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")
MOST_LINES = 8


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_has_no_outputs_and_only_existing_link_targets(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert cleaned(text) == text, "run `make pages`"
    ast.parse(code_of(text))
    missing = [
        each for each in LINK.findall(markdown_of(text)) if not (path.parent / each).exists()
    ]
    assert missing == []


def test_first_notebook_trains_a_model_in_eight_lines() -> None:
    text = (ROOT / "examples" / "notebooks" / "first-federation.ipynb").read_text()
    first = next(cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code")
    lines = [line for line in first["source"] if line.strip()]
    assert "network = run.model()" in lines
    assert len(lines) <= MOST_LINES


def test_pages_link_to_all_notebooks() -> None:
    linked = {
        (ROOT / "docs/start" / each).resolve()
        for each in LINK.findall((ROOT / "docs/start/selection-in-python.md").read_text())
    }
    assert set(NOTEBOOKS) - linked == set()
    site = (ROOT / "mkdocs.yml").read_text()
    assert [each.stem for each in NOTEBOOKS if f"notebooks/{each.stem}.md" not in site] == []


def test_site_navigation_lists_every_page() -> None:
    site = (ROOT / "mkdocs.yml").read_text()
    pages = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(str(page) for page in pages if f": {page}\n" not in site) == []


def test_notebook_cleaning_removes_outputs_and_kernel_metadata() -> None:
    cell = {"cell_type": "code", "id": "x", "metadata": {"tags": ["a"]}, "source": "1 + 1\n"}
    run = cell | {"execution_count": 3, "outputs": [{"output_type": "execute_result"}]}
    note = {"cell_type": "markdown", "metadata": {}, "source": ["# Title\n", "text"]}
    left = json.dumps({"cells": [note, run], "metadata": {"widgets": {}}, "nbformat": 4})
    kept = json.loads(cleaned(left))
    assert kept["cells"][1] == {
        "cell_type": "code",
        "execution_count": None,
        "id": "cell-1",
        "metadata": {},
        "outputs": [],
        "source": ["1 + 1"],
    }
    assert kept["cells"][0]["source"] == ["# Title\n", "text"]
    assert cleaned(cleaned(left)) == cleaned(left)
    assert "widgets" not in kept["metadata"]
