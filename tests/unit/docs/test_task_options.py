"""The page on data lists every option of the tasks without files, with its default."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

from potluck.common.settings.plugins import TASKS, find

PAGE = Path(__file__).parents[3] / "docs/reference/data.md"
TASKS_WITHOUT_FILES = ("digits", "colored-digits", "heart")


def documented() -> dict[str, dict[str, object]]:
    """Return the default of each option by task, as the page has them."""
    section = PAGE.read_text(encoding="utf-8").split("## Tasks without files")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (\S+) \| (\S+) \| (\S+) \| .+ \|$", section, re.MULTILINE)
    found: dict[str, dict[str, object]] = {name: {} for name in TASKS_WITHOUT_FILES}
    for option, *defaults in rows:
        for task, default in zip(TASKS_WITHOUT_FILES, defaults, strict=True):
            if default != "–":
                found[task][option] = json.loads(default)
    return found


def test_page_lists_the_options_of_tasks_without_files() -> None:
    assert documented() == {
        name: {each.name: each.default for each in dataclasses.fields(find(TASKS, name))}
        for name in TASKS_WITHOUT_FILES
    }
