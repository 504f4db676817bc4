"""Copy the tables and pictures of an experiment's report to a page of the docs.

    .venv/bin/python tools/report_page.py potluck-experiments/NAME docs/research/PAGE.md

Between `<!-- report NAME: TITLE -->` and `<!-- /report -->`, it writes the table with this title
from the folder's report.md; `Results` stands for the first table, which has no title. Every picture
that the page shows as `../images/NAME-PICTURE.png` is replaced by the folder's PICTURE.png, with
fewer colours.
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from PIL import Image

FIRST = "Results"
_COLOURS = 256
_MARKED = re.compile(r"(<!-- report ([\w.-]+): (.+?) -->\n).*?(<!-- /report -->)", re.DOTALL)


def tables(report: str) -> dict[str, str]:
    """Return the first table of each section of a report.md, by the section's title."""
    found: dict[str, str] = {}
    for section in re.split(r"^## ", f"{FIRST}\n{report}", flags=re.MULTILINE):
        title, _, text = section.partition("\n")
        table = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
        if table is not None:
            found.setdefault(title.strip(), table[0])
    return found


def filled(page: str, report: str, name: str) -> str:
    """Return the page with the report's tables. Raises SystemExit if the report lacks a table."""
    known = tables(report)

    def table(match: re.Match[str]) -> str:
        if match[2] != name:
            return match[0]
        if match[3] not in known:
            raise SystemExit(f"the report has no '{match[3]}'; it has: {', '.join(known)}")
        return f"{match[1]}\n{known[match[3]]}\n{match[4]}"

    return _MARKED.sub(table, page)


def pictures(page: str, name: str) -> list[str]:
    """Return the names of an experiment's pictures on a page, without `.png`."""
    return re.findall(rf"/images/{re.escape(name)}-(\w+)\.png\)", page)


def with_fewer_colours(png: bytes) -> bytes:
    """Return a diagram's PNG with fewer colours: the file is much smaller, the picture alike."""
    buffer = io.BytesIO()
    with Image.open(io.BytesIO(png)) as image:
        image.convert("RGB").quantize(_COLOURS).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def write(results: Path, page: Path) -> None:
    """Write the page and its pictures."""
    text = page.read_text(encoding="utf-8")
    report = (results / "report.md").read_text(encoding="utf-8")
    page.write_text(filled(text, report, results.name), encoding="utf-8")
    for picture in pictures(text, results.name):
        target = page.parents[1] / "images" / f"{results.name}-{picture}.png"
        target.write_bytes(with_fewer_colours((results / f"{picture}.png").read_bytes()))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    write(Path(sys.argv[1]), Path(sys.argv[2]))
