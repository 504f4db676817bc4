"""The README is short, and its numbers are those of the code."""

from __future__ import annotations

import tomllib

import pytest
from support.repository import ROOT

README = (ROOT / "README.md").read_text()
MOST_WORDS = 700


def test_readme_has_at_most_the_maximum_number_of_words() -> None:
    assert len(README.split()) <= MOST_WORDS


@pytest.mark.parametrize(
    ("label", "group"),
    [
        ("[selectors]", "potluck.selectors"),
        ("[strategies]", "potluck.strategies"),
        ("[objectives]", "potluck.objectives"),
        ("[tasks]", "potluck.tasks"),
        ("[trackers]", "potluck.sinks"),
    ],
)
def test_readme_table_of_contents_has_the_number_of_installed_plugins(
    label: str, group: str
) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [row] = [line for line in README.splitlines() if line.startswith(f"| {label}")]
    points = project["entry-points"][group].values()
    named = [point for point in points if not point.endswith("OldName")]
    assert row.split("|")[-2].strip() == str(len(named))
