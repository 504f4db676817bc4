"""The pages of the documentation, and the blocks of code on them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from support.repository import ROOT

PAGES = [
    ROOT / "README.md",
    *(
        page
        for page in sorted((ROOT / "docs").rglob("*.md"))
        if page.parent.name not in ("adr", "api")
    ),
    *sorted((ROOT / "examples").glob("*/README.md")),
]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))

_BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Block:
    """A block of code on a page, and the line on which it begins."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    """Return all blocks of code in these languages, on all pages."""
    return [
        Block(
            page=page,
            line=text.count("\n", 0, found.start()) + 1,
            language=found[2],
            text=re.sub(f"^{found[1]}", "", found[3], flags=re.MULTILINE),
        )
        for page in PAGES
        for text in [page.read_text(encoding="utf-8")]
        for found in _BLOCK.finditer(text)
        if found[2] in languages
    ]
