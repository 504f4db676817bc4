"""The picture of the rooms shows the tree as it is."""

import subprocess
import sys
from pathlib import Path

HOUSE = Path(__file__).resolve().parents[3]
PICTURE = HOUSE / "docs" / "images" / "rooms.svg"


def test_the_committed_picture_is_what_the_script_draws() -> None:
    command = [sys.executable, str(HOUSE / "tools" / "rooms_picture.py")]
    drawn = subprocess.run(command, check=True, capture_output=True, text=True, cwd="/").stdout
    assert drawn == PICTURE.read_text(), "the rooms have changed; run: make pages"
