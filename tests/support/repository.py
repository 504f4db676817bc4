"""Location of the repository, for tests that read its other files."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTDATA = ROOT / "tests" / "testdata"
