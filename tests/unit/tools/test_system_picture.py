"""The picture of a federation's processes is drawn by its script."""

from pathlib import Path

from system_picture import picture

HOUSE = Path(__file__).resolve().parents[3]


def test_committed_picture_of_the_system_equals_the_generated_one() -> None:
    drawn = (HOUSE / "docs" / "images" / "system.svg").read_text()
    assert picture() == drawn, "the picture has changed; run: make pages"
