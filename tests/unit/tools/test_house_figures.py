"""The counts of the code's shape."""

import re
from pathlib import Path

import pytest

import house_figures

SOURCES = {
    "secagg/potluck/secagg/protocol/masks.py": "def mask(): ...\n",
    "secagg/potluck/secagg/coordinator/counts.py": (
        "from potluck.secagg.protocol.masks import mask\n"
    ),
    "server/potluck/server/run/commit.py": """
from potluck.secagg.protocol.masks import mask
from potluck.secagg.protocol import (
    masks,
)
from potluck.secagg.coordinator.counts import Counts

class LiveShown:
    bytes_up: int

class Committed:
    bytes_up: int

    class Part:
        seconds: float
""",
    "server/potluck/server/service.py": "import potluck.server.run.commit\n",
    "deploy/potluck/deploy/cli.py": "from potluck.secagg.protocol.masks import mask\n",
}


@pytest.fixture
def house(tmp_path: Path) -> list[house_figures.Module]:
    for name, text in SOURCES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return house_figures.read_modules(tmp_path)


def test_name_imported_from_a_guest_is_counted_once(
    house: list[house_figures.Module],
) -> None:
    assert house_figures.guest_imports(house) == {
        "secure aggregation": {
            "potluck.secagg.protocol.masks.mask": {"potluck.server.run.commit"},
            "potluck.secagg.protocol.masks": {"potluck.server.run.commit"},
            "potluck.secagg.coordinator.counts.Counts": {"potluck.server.run.commit"},
        }
    }


def test_lines_imports_and_classes_of_modules_are_counted(
    house: list[house_figures.Module],
) -> None:
    commit = next(module for module in house if module.name.endswith("commit"))
    assert (commit.import_lines, commit.lines, commit.subpackage) == (5, 15, "server.run")
    assert commit.plain_lines == 4
    assert [node.name for node in commit.classes] == ["LiveShown", "Committed", "Part"]
    importers = house_figures.importers(house)
    assert importers["potluck.server.run.commit"] == {"potluck.server.service"}
    assert len(importers["potluck.secagg.protocol.masks"]) == 3


def test_round_forms_are_classes_and_messages_with_bytes_up(
    house: list[house_figures.Module],
) -> None:
    schema = {"a.proto": "message Yes {\n  uint64 bytes_up = 1;\n}\nmessage No {\n}\n"}
    schema["b.proto"] = "message RoundProgress {\n  uint64 bytes_up = 1;\n}\n"
    assert house_figures.round_forms(house, schema) == [
        "potluck.server.run.commit.Committed",
        *house_figures.OTHER_FORMS,
        "a.proto: Yes",
    ]


def test_walk_that_enters_a_subpackage_again_is_counted_as_a_return() -> None:
    links = {
        step: f"[`x`](../server/potluck/server/{step}.py) `do`"
        for step in ("run/a", "run/b", "store/c", "run/d", "store/e", "hosts/f")
    }
    page = (
        f"## Walk 1: bytes\n\n1. {links['run/a']},\n   {links['run/b']}\n2. {links['store/c']}\n"
        f"3. {links['run/d']}\n\nA variant differs: {links['hosts/f']}.\n\n4. {links['store/e']}\n"
        f"\n## Walk 2\n\n1. {links['hosts/f']}\n"
    )
    passed = house_figures.walk(page)
    assert passed == ["server.run", "server.store", "server.run", "server.store"]
    assert house_figures.returns(passed) == {"server.run": 1, "server.store": 1}


@pytest.fixture(scope="module")
def product() -> list[house_figures.Module]:
    return house_figures.read_modules()


def test_every_guest_package_exists_in_the_tree(product: list[house_figures.Module]) -> None:
    names = [module.name for module in product]
    guests = {house_figures.guest_of(name) for name in names}
    assert set(house_figures.GUESTS) <= guests


def test_every_class_that_is_not_a_committed_round_exists_with_the_field(
    product: list[house_figures.Module],
) -> None:
    names = {node.name for module in product for node in module.classes}
    names |= {
        name for text in house_figures.read_schema().values() for name in messages_with_field(text)
    }
    assert set(house_figures.NOT_COMMITTED) <= names


def messages_with_field(text: str) -> list[str]:
    """Return the messages of a schema's file that have the field of a committed round."""
    found = house_figures.MESSAGE.findall(text)
    return [name for name, body in found if house_figures.ROUND_FIELD in body]


def test_every_form_without_the_field_exists(product: list[house_figures.Module]) -> None:
    texts = {module.name: module.text for module in product}
    for form in house_figures.OTHER_FORMS:
        module, _, name = form.rpartition(".")
        assert re.search(rf"^(def|class) {name}\b|^{name} = ", texts[module], re.MULTILINE), form


def test_subclasses_of_a_committed_round_are_forms_of_it(
    product: list[house_figures.Module],
) -> None:
    forms = house_figures.round_forms(product, house_figures.read_schema())
    assert {
        "potluck.common.records.round.Round",
        "potluck.server.store.records.RoundRow",
        "potluck.federation.rounds.Round",
    } <= set(forms)


def test_table_on_the_page_has_the_current_figures_and_cells_of_few_words(
    product: list[house_figures.Module],
) -> None:
    table = house_figures.page_table(product)
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    assert house_figures.BEGIN + table in house_figures.PAGE.read_text(), "run `make pages`"
    assert {row[0] for row in rows} == set(house_figures.REASONS)
    assert [row for row in rows if len(row) != 4 or len(row[3].split()) > 20] == []


def test_figures_table_lists_each_goal(product: list[house_figures.Module]) -> None:
    rows = house_figures.figures(product)
    goals = [goal for _, _, goal in rows if goal]
    assert {"≤ 46,000", "≤ 400", "≤ 600", "≤ 8 %", "0", "≤ 8", "≤ 5"} <= set(goals)
    counted = {what: int(number.replace(",", "")) for what, number, _ in rows if "%" not in number}
    assert counted["subpackages that an update passes"] > 8
    assert counted["forms of a committed round"] > 0
