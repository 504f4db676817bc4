"""The pages in docs/reference/selectors, and the guide to profile files, against the code."""

import json
import re
from pathlib import Path

import pytest
from support.repository import ROOT

from potluck.common.errors import ConfigurationError
from potluck.common.settings.plugins import SELECTORS
from potluck.deploy.operator.offline_selection import read_profile_file, select_offline
from potluck.server.plan.plan import draw_up
from potluck.server.selectors.fedentopt import FedEntOpt
from reference_pages import FIELDS, filled, marked, overview, pages

PAGES = pages(SELECTORS)
FOLDER = ROOT / "docs" / "reference" / "selectors"
GUIDE = (ROOT / "docs" / "guides" / "try-a-selector.md").read_text(encoding="utf-8")
RUN = 'secure_aggregation = true\n[task]\nname = "colored-digits"\nclients = 20\n'


def test_every_selector_has_a_page_and_a_row_in_the_overview() -> None:
    assert {page.stem for page in FOLDER.glob("*.md")} == {*PAGES, "index"}
    index = (FOLDER / "index.md").read_text(encoding="utf-8")
    assert marked(index, "overview", overview(SELECTORS)) == index, "run: make pages"


@pytest.mark.parametrize("name", PAGES)
def test_selector_page_has_the_five_sections_and_the_generated_facts(name: str) -> None:
    text = PAGES[name].read_text(encoding="utf-8")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE)[: len(FIELDS)] == list(FIELDS)
    assert filled(SELECTORS, name, text) == text, "run: make pages"
    assert not re.search(r"^\| `.*\|  \|$", text, re.MULTILINE), "an option without an effect"


@pytest.mark.parametrize(
    ("name", "option"), [("kl", "truncate = true"), ("feel", "unbiased = true")]
)
def test_selector_options_incompatible_with_secure_aggregation_are_refused(
    name: str, option: str
) -> None:
    needs = PAGES[name].read_text(encoding="utf-8").partition("## Costs")[0]
    assert f"`{option}` does not work with secure aggregation" in " ".join(needs.split())
    with pytest.raises(ConfigurationError, match=f"selector {name} and secure aggregation are"):
        draw_up(f'{RUN}[selector]\nname = "{name}"\n{option}\n', source="run file")


def test_profile_file_example_of_the_guide_gives_the_output_shown(tmp_path: Path) -> None:
    profiles, line = re.findall(r"```json\n(.*?)```", GUIDE, re.DOTALL)
    path = tmp_path / "profiles.json"
    path.write_text(profiles)
    population = read_profile_file(path)
    found = [
        next(
            select_offline(FedEntOpt(), population, "fedentopt", rounds=1, count=2, seed=seed)
        ).selection
        for seed in range(20)
    ]
    shown = json.loads(line)
    possible = [
        dict(zip([population.ids[int(row)] for row in s.rows], s.reasons, strict=True))
        for s in found
    ]
    assert shown["reasons"] in possible
    assert list(shown["reasons"]) == shown["cohort"]
