"""The packages that pages of docs/guides let a reader write."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

GUIDES = Path(__file__).parents[2] / "docs/guides"


def install_package_of(guide: str, folder: Path, *, files: Sequence[str]) -> Path:
    """Install the package that a guide describes, and return the folder in which it is.

    guide: name of a page of docs/guides. folder: for the package and its installation. files: the
    names that the package's files must have, sorted.
    """
    page = (GUIDES / guide).read_text(encoding="utf-8")
    written = _written_files(page)
    assert sorted(written) == list(files)
    source, target = folder / "source", folder / "installed"
    source.mkdir()
    for name, text in written.items():
        (source / name).write_text(text, encoding="utf-8")
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--no-compile"]
    command = [sys.executable, "-m", "pip", "install", *options]
    subprocess.run([*command, "--target", str(target), str(source)], check=True)
    return target


def _written_files(page: str) -> dict[str, str]:
    """Return the page's code blocks that begin with a comment with their file's name."""
    blocks = re.findall(
        r"^```\w+\n(# (\S+\.(?:py|toml))\n.*?)^```$", page, re.DOTALL | re.MULTILINE
    )
    return {name: text for text, name in blocks}
