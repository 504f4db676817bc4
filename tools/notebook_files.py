"""Normalises notebooks: removes outputs and formats the JSON, so that diffs are readable.

    python tools/notebook_files.py [--code FOLDER] NOTEBOOK…

rewrites the notebooks. With --code, it does not change notebooks, but writes the code of each into
a folder as a module, for type checkers.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
_SHOWN = "# pyright: strict, reportUnusedExpression=false, reportUnknownMemberType=false\n"
"""Pyright settings: a cell may end with an expression; torch and matplotlib lack some types."""


def cleaned(text: str) -> str:
    """Return a notebook's JSON without outputs and execution metadata; cell ids are numbered."""
    cells = [_clean_cell(cell, number) for number, cell in enumerate(json.loads(text)["cells"])]
    notebook = {"cells": cells, "metadata": _METADATA, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def _clean_cell(cell: dict[str, Any], number: int) -> dict[str, Any]:
    kind = cell["cell_type"]
    lines = source_of(cell).strip("\n").splitlines(keepends=True)
    clean = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": lines}
    return clean if kind == "markdown" else clean | {"execution_count": None, "outputs": []}


def source_of(cell: dict[str, Any]) -> str:
    """Return the text of a cell, which may be stored as a list of lines."""
    source = cell["source"]
    return source if isinstance(source, str) else "".join(source)


def code_of(text: str) -> str:
    """Return the code cells of a notebook as one module."""
    cells = json.loads(text)["cells"]
    return _SHOWN + "\n".join(
        f"# cell {number}\n{source_of(cell)}\n"
        for number, cell in enumerate(cells)
        if cell["cell_type"] == "code"
    )


def markdown_of(text: str) -> str:
    """Return a notebook as a Markdown page with code blocks."""
    return "\n\n".join(
        source_of(cell)
        if cell["cell_type"] == "markdown"
        else f"```python\n{source_of(cell).strip()}\n```"
        for cell in json.loads(text)["cells"]
    )


def main() -> None:
    """Rewrite notebooks, or write their code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--code", type=Path, metavar="FOLDER")
    parser.add_argument("notebooks", type=Path, nargs="+", metavar="NOTEBOOK")
    arguments = parser.parse_args()
    for path in arguments.notebooks:
        text = path.read_text(encoding="utf-8")
        if arguments.code is None:
            path.write_text(cleaned(text), encoding="utf-8")
            continue
        arguments.code.mkdir(parents=True, exist_ok=True)
        module = arguments.code / f"{path.stem.replace('-', '_')}.py"
        module.write_text(code_of(text), encoding="utf-8")


if __name__ == "__main__":
    main()
