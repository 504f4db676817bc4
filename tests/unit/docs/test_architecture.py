"""docs/architecture.md, CONTRIBUTING.md and the pages on privacy speak of the tree as it is."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

HOUSE = Path(__file__).resolve().parents[3]
PAGES = ["docs/architecture.md", "CONTRIBUTING.md"]
PRIVACY = [
    f"docs/{page}.md"
    for page in ("threat-model", "profiles", "masked-updates", "secure-aggregation")
]

LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)[^)]*\)")
LABELLED = re.compile(r"\[`([^`]+)`\]\(([^)\s]+)\)")
QUOTED_PATH = re.compile(r"`(\.?[\w-]+/[\w./-]*|[\w-]+\.(?:md|toml|txt|yaml))`")
FUNCTIONS = re.compile(r"\]\(([^)\s]+\.py)\)((?:,?\s(?:and\s)?`\w+`)+)")


def linked(name: str) -> Iterator[Path]:
    """The files and folders that a page links to."""
    for target in LINK.findall((HOUSE / name).read_text()):
        yield (HOUSE / name).parent / target


@pytest.mark.parametrize("name", [*PAGES, *PRIVACY])
def test_every_link_leads_somewhere(name: str) -> None:
    targets = list(linked(name))
    assert targets
    assert [str(target) for target in targets if not target.exists()] == []


def test_every_path_in_the_text_exists() -> None:
    texts = [LABELLED.sub("", (HOUSE / name).read_text()) for name in PAGES]
    paths = {path for text in texts for path in QUOTED_PATH.findall(text)}
    assert len(paths) > 10
    assert sorted(path for path in paths if not (HOUSE / path).exists()) == []


@pytest.mark.parametrize("name", PAGES)
def test_every_link_is_called_as_its_target(name: str) -> None:
    links = LABELLED.findall((HOUSE / name).read_text())
    ends = [(label.rpartition("…/")[2].strip("/"), target) for label, target in links]
    assert [f"{end}: {target}" for end, target in ends if end not in target] == []


def test_every_function_is_in_the_file_named_with_it() -> None:
    text = (HOUSE / "docs" / "architecture.md").read_text()
    named = [
        (target, function)
        for target, functions in FUNCTIONS.findall(text)
        for function in re.findall(r"\w+", functions.replace(" and ", " "))
    ]
    assert len(named) > 80
    missing = [
        f"{function} in {target}"
        for target, function in named
        if not re.search(rf"\bdef {function}\(", (HOUSE / "docs" / target).read_text())
    ]
    assert missing == []
