"""The page on extras names all of them."""

import re
import tomllib

from support.repository import ROOT

from potluck.common.settings.extras import INSTALLING


def test_extras_table_lists_every_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    rows = [
        line.split("|")[1]
        for line in (ROOT / "docs/contributing/adr/0013-extras.md").read_text().splitlines()
        if line.startswith("| `potluck[")
    ]
    named = {name for row in rows for name in re.findall(r"\[(\w+)\]", row)}
    assert named == set(project["optional-dependencies"])


def test_page_named_in_missing_library_errors_lists_all_extras() -> None:
    page = (ROOT / INSTALLING).read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name in set(project["optional-dependencies"]) - {"dev", "docs", "test"}:
        assert f"`{name}`" in page
