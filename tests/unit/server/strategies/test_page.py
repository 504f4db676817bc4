"""The pages on strategies and objectives in docs/reference against the code."""

import inspect
import re

import pytest
from support.repository import ROOT

from compatibility_table import built_in, markdown, try_all
from potluck.common.settings.plugins import MODELS, OBJECTIVES, STRATEGIES, find
from reference_pages import FIELDS, filled, marked, overview, pages

FOLDER = ROOT / "docs" / "reference" / "strategies"
PAGES = pages(STRATEGIES)
INDEX = (FOLDER / "index.md").read_text(encoding="utf-8")
COMPATIBILITY = (FOLDER / "compatibility.md").read_text(encoding="utf-8")
LOSSES = (ROOT / "docs" / "reference" / "objectives.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `([a-z-]+)` \| [^|]*[a-z][^|]* \|([^|]*)\|$", LOSSES, re.MULTILINE)


def test_every_strategy_has_a_page_and_a_row_in_the_overview() -> None:
    assert {page.stem for page in FOLDER.glob("*.md")} == {*PAGES, "index", "compatibility"}
    assert marked(INDEX, "overview", overview(STRATEGIES)) == INDEX, "run: make pages"


@pytest.mark.parametrize("name", PAGES)
def test_strategy_page_has_the_five_sections_and_the_generated_facts(name: str) -> None:
    text = PAGES[name].read_text(encoding="utf-8")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE)[: len(FIELDS)] == list(FIELDS)
    assert filled(STRATEGIES, name, text) == text, "run: make pages"
    assert not re.search(r"^\| `.*\|  \|$", text, re.MULTILINE), "an option without an effect"


def test_objective_table_lists_all_objectives() -> None:
    assert sorted(name for name, _ in ROWS) == sorted(built_in(OBJECTIVES))


@pytest.mark.parametrize(("name", "options"), ROWS)
def test_objective_table_lists_all_options_with_their_defaults(name: str, options: str) -> None:
    written = re.findall(r"`(\w+)` \((.+?)\)", options)
    parameters = inspect.signature(find(OBJECTIVES, name)).parameters
    assert [option for option, _ in written] == list(parameters)
    for option, default in written:
        value = parameters[option].default
        shown = str(value).lower() if isinstance(value, bool) else str(value)
        assert default.strip("`") == shown


def test_compatibility_table_on_the_page_equals_the_computed_one() -> None:
    [table] = re.findall(
        r"<!-- compatibility -->\n(.*)<!-- /compatibility -->", COMPATIBILITY, re.DOTALL
    )
    assert table == markdown(try_all()), "run: make pages"


def test_strategy_index_names_all_models() -> None:
    assert all(f"`{name}`" in INDEX for name in built_in(MODELS))
