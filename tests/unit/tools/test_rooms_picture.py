"""The picture of the subpackages matches the tree."""

import subprocess
import sys
from pathlib import Path

HOUSE = Path(__file__).resolve().parents[3]
PICTURE = HOUSE / "docs" / "images" / "rooms.svg"


def test_committed_picture_of_subpackages_equals_the_generated_one() -> None:
    command = [sys.executable, str(HOUSE / "tools" / "rooms_picture.py")]
    drawn = subprocess.run(command, check=True, capture_output=True, text=True, cwd="/").stdout
    assert drawn == PICTURE.read_text(), "the rooms have changed; run: make pages"
