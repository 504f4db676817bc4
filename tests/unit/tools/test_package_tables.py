"""The tables of packages match the tree."""

from pathlib import Path

import pytest

import package_tables

HOUSE = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("name", package_tables.TABLES)
def test_package_table_on_a_page_equals_the_generated_one(name: str) -> None:
    table = package_tables.TABLES[name]()
    assert package_tables.BEGIN + table in (HOUSE / name).read_text(), "run: make pages"


def test_package_table_has_a_row_with_a_summary_for_each_subpackage() -> None:
    table = package_tables.long_table()
    rows = [row.split(" | ") for row in table.splitlines()[2:]]
    assert len(rows) > 40
    assert [where for where, what in rows if what.strip(" |") == ""] == []
    assert "| `server/` | `server` | `eligibility`" in package_tables.short_table()
