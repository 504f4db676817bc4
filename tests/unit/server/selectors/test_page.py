"""docs/reference/selectors/index.md against the code."""

import inspect
import json
import re
from importlib.metadata import distribution
from pathlib import Path

import pytest
from support.repository import ROOT

from potluck.common.errors import ConfigurationError
from potluck.common.settings.plugins import SELECTORS, find
from potluck.deploy.operator.offline_selection import select_offline
from potluck.deploy.operator.profile_file import read_profile_file
from potluck.server.rounds.plan import draw_up
from potluck.server.selection import Signal
from potluck.server.selectors.fedentopt import FedEntOpt

PAGE = (ROOT / "docs/reference/selectors/index.md").read_text(encoding="utf-8")
FIRST, COSTS = PAGE.split("## What they need, tell and cost")
ROWS = re.findall(r"^\| `([a-z-]+)` \|.*\| (.*)\|$", FIRST, re.MULTILINE)
ALL = {
    cells[0].strip("`"): cells[1:]
    for line in re.findall(r"^\| (`.*) \|$", COSTS, re.MULTILINE)
    if len(cells := line.split(" | ")) == 6
}
"""By selector: needs, disclosures, cost, compatibility with masked updates, and paper."""
RUN = 'secure_aggregation = true\n[task]\nname = "colored-digits"\nclients = 20\n'


@pytest.mark.parametrize(("name", "options"), ROWS)
def test_the_table_has_all_options_with_their_defaults(name: str, options: str) -> None:
    written = re.findall(r"`(\w+)` \((.+?)\)", options)
    parameters = inspect.signature(find(SELECTORS, name)).parameters
    assert [option for option, _ in written] == list(parameters)
    for option, default in written:
        value = parameters[option].default
        shown = str(value).lower() if isinstance(value, bool) else str(value)
        assert default.strip("`") == shown or value is None


def test_the_table_has_all_selectors() -> None:
    assert {name for name, _ in ROWS} == {
        entry.name for entry in distribution("potluck").entry_points if entry.group == SELECTORS
    }


def masked(name: str) -> bool:
    """Return True if a run with masked updates may have this selector."""
    added = "added = 2\n" if name == "dc-exhaustive" else ""
    try:
        draw_up(f'{RUN}[selector]\nname = "{name}"\n{added}', source="run file")
    except ConfigurationError as error:
        return "secure aggregation" not in error.message
    return True


def test_the_second_table_has_all_selectors_and_says_which_go_with_masked_updates() -> None:
    assert sorted(ALL) == sorted(name for name, _ in ROWS)
    assert all(all(cells) for cells in ALL.values())
    told = {name for name, cells in ALL.items() if cells[3].startswith("yes")}
    assert told == set(filter(masked, ALL))


@pytest.mark.parametrize("name", ALL)
def test_the_second_table_says_what_each_needs(name: str) -> None:
    """Words after a semicolon name needs of an option."""
    said = ALL[name][0].partition(";")[0]
    selector = find(SELECTORS, name)()
    profiles = {
        "label counts": Signal.LABEL_COUNTS,
        "triplets": Signal.TRIPLET,
        "interaction matrices": Signal.INTERACTION_MATRIX,
    }
    assert {signal for words, signal in profiles.items() if words in said} == selector.needs
    assert set(re.findall("`(.+?)`", said)) == selector.asks
    assert ("report" in said) == bool(selector.reports)
    assert said.startswith(("updates", "moves of")) == bool(selector.learns)
    assert ("evaluation data" in said) == selector.measures


@pytest.mark.parametrize(
    ("name", "option"), [("kl", "truncate = true"), ("feel", "unbiased = true")]
)
def test_options_that_do_not_go_with_masked_updates_are_refused_before_the_run(
    name: str, option: str
) -> None:
    assert option.partition(" ")[0] in ALL[name][3]
    with pytest.raises(ConfigurationError, match=f"selector {name} and secure aggregation don't"):
        draw_up(f'{RUN}[selector]\nname = "{name}"\n{option}\n', source="run file")


def test_the_example_is_a_profile_file_and_gives_the_line_shown(tmp_path: Path) -> None:
    profiles, line = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    path = tmp_path / "profiles.json"
    path.write_text(profiles)
    population = read_profile_file(path)
    found = [
        next(select_offline(FedEntOpt(), population, rounds=1, count=2, seed=seed)).selection
        for seed in range(20)
    ]
    shown = json.loads(line)
    possible = [
        dict(zip([population.ids[int(row)] for row in s.rows], s.reasons, strict=True))
        for s in found
    ]
    assert shown["reasons"] in possible
    assert list(shown["reasons"]) == shown["cohort"]
