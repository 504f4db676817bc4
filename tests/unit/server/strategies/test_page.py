"""docs/reference/strategies/index.md against the code."""

import inspect
import re

import pytest
from support.repository import ROOT

from compatibility_table import built_in, markdown, try_all
from potluck.common.settings.plugins import MODELS, OBJECTIVES, STRATEGIES, find

PAGE = (ROOT / "docs/reference/strategies/index.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `([a-z-]+)` \| [^|]*[a-z][^|]* \|([^|]*)\|$", PAGE, re.MULTILINE)
GROUP = {n: group for group in (STRATEGIES, OBJECTIVES) for n in built_in(group)}


def test_the_tables_have_all_strategies_and_objectives() -> None:
    assert sorted(name for name, _ in ROWS) == sorted(GROUP)


@pytest.mark.parametrize(("name", "options"), ROWS)
def test_the_tables_have_all_options_with_their_defaults(name: str, options: str) -> None:
    written = re.findall(r"`(\w+)` \((.+?)\)", options)
    parameters = inspect.signature(find(GROUP[name], name)).parameters
    assert [option for option, _ in written] == list(parameters)
    for option, default in written:
        value = parameters[option].default
        shown = str(value).lower() if isinstance(value, bool) else str(value)
        assert default.strip("`") == shown or value is None


def test_what_goes_together_is_what_was_tried() -> None:
    [table] = re.findall(r"<!-- compatibility -->\n(.*)<!-- /compatibility -->", PAGE, re.DOTALL)
    assert table == markdown(try_all()), "run: make pages"


def test_all_models_are_named() -> None:
    assert all(f"`{name}`" in PAGE for name in built_in(MODELS))
