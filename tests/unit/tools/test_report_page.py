"""Copying a report's tables and pictures to a docs page."""

import io
from pathlib import Path

import pytest
from PIL import Image

from report_page import write

REPORT = """# A title

| arm | Accuracy |
| --- | ---: |
| a | 0.5 |

## Mean ranks

| arm | rank |
| --- | ---: |
| a | 1.00 |

- A note.
"""
PAGE = """# A page

Text before.

<!-- report some: Mean ranks -->
an old table
<!-- /report -->

![ranks](../images/some-ranks.png)

<!-- report some: Results -->
<!-- /report -->

<!-- report another: Results -->
of another experiment
<!-- /report -->
"""


def test_marked_tables_and_pictures_on_a_page_are_replaced(tmp_path: Path) -> None:
    results, page = tmp_path / "some", tmp_path / "research" / "page.md"
    results.mkdir()
    page.parent.mkdir()
    (tmp_path / "images").mkdir()
    (results / "report.md").write_text(REPORT)
    picture = io.BytesIO()
    Image.radial_gradient("L").convert("RGB").save(picture, "PNG")
    (results / "ranks.png").write_bytes(picture.getvalue())
    page.write_text(PAGE)
    for _ in range(2):
        write(results, page)
        text = page.read_text()
        assert "an old table" not in text
        assert (
            "<!-- report some: Mean ranks -->\n\n| arm | rank |\n| --- | ---: |\n| a | 1.00 |\n"
            in text
        )
        assert text.count("| a | 0.5 |") == 1
        assert "of another experiment" in text
        assert text.startswith("# A page\n\nText before.\n")
    with Image.open(tmp_path / "images" / "some-ranks.png") as small:
        assert small.size == (256, 256)
        assert len(small.getcolors() or []) <= 256


def test_marked_table_missing_from_the_report_is_refused(tmp_path: Path) -> None:
    results, page = tmp_path / "some", tmp_path / "research" / "page.md"
    results.mkdir()
    page.parent.mkdir()
    (results / "report.md").write_text(REPORT)
    page.write_text("<!-- report some: Costs -->\n<!-- /report -->\n")
    with pytest.raises(SystemExit, match="no 'Costs'; it has: Results, Mean ranks"):
        write(results, page)
