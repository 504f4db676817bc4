"""The order in which workers take tests."""

from __future__ import annotations

import ast

import pytest
from support.repository import ROOT
from support.side_by_side import APART, LONGEST, ordered, unit_of


@pytest.mark.parametrize("unit", LONGEST)
def test_every_entry_of_the_longest_tests_exists(unit: str) -> None:
    file, _, test = unit.partition("::")
    tree = ast.parse((ROOT / file).read_text())
    names = {each.name for each in tree.body if isinstance(each, ast.AsyncFunctionDef)}
    assert unit_of(unit) == unit
    assert not test or test.partition("[")[0] in names


@pytest.mark.parametrize("file", APART)
def test_tests_of_a_split_file_are_scheduled_separately(file: str) -> None:
    assert (ROOT / file).exists()
    assert unit_of(f"{file}::test_one[a]") == f"{file}::test_one[a]"


def test_tests_of_an_ordinary_file_are_scheduled_together() -> None:
    assert unit_of("tests/e2e/test_demo.py::test_one[a]") == "tests/e2e/test_demo.py"


def test_longest_tests_are_scheduled_first_and_then_the_largest_files() -> None:
    small, large = "tests/a.py", "tests/b.py"
    found = ordered([f"{small}::one", f"{large}::one", f"{large}::two", LONGEST[2], LONGEST[0]])
    assert found == [LONGEST[0], LONGEST[2], f"{large}::one", f"{large}::two", f"{small}::one"]
