"""`potluck new selector`: the package it writes, and the names and folders it refuses."""

import tomllib
from pathlib import Path

import pytest

from potluck.common.errors import ConfigurationError, StorageError
from potluck.experiments.grid.definition import ExperimentFile
from potluck.experiments.grid.grid_cells import cells_of, code_of
from potluck.experiments.templates.selector_package import write_selector_package


def test_package_has_code_tests_and_an_entry_point(tmp_path: Path) -> None:
    folder = write_selector_package("rare-2-first", tmp_path / "of" / "mine")
    assert folder == tmp_path / "of" / "mine" / "rare-2-first-selector"
    files = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.*")}
    assert sorted(files) == [
        "README.md",
        "grid.toml",
        "profiles.json",
        "pyproject.toml",
        "rare_2_first_selector.py",
        "tests/test_rare_2_first_selector.py",
    ]
    assert "$" not in "".join(files.values())
    project = tomllib.loads(files["pyproject.toml"])["project"]
    assert project["entry-points"] == {
        "potluck.selectors": {"rare-2-first": "rare_2_first_selector:Rare2FirstSelector"}
    }


def test_edited_code_of_another_package_makes_another_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_selector_package("late-first", tmp_path)
    metadata = folder / "late_first_selector-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: late-first-selector\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[potluck.selectors]\nlate-first = late_first_selector:LateFirstSelector\n"
    )
    monkeypatch.syspath_prepend(folder)

    def digest() -> str:
        code_of.cache_clear()
        run = {"task": {"name": "digits"}, "selector": {"name": "late-first"}, "rounds": 1}
        plan = ExperimentFile.model_validate(
            {"name": "x", "title": "x", "seeds": [0], "run": run, "axes": {}}
        )
        [cell] = cells_of(plan, hosts=1, source=Path("x.toml"))
        return cell.digest

    before = digest()
    assert digest() == before
    code = folder / "late_first_selector.py"
    code.write_text(code.read_text() + "\n# edited\n")
    assert digest() != before


@pytest.mark.parametrize(
    "name", ["", "Rare", "rare_first", "rare--first", "-rare", "2rare", "../rare", "r" * 41]
)
def test_invalid_name_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="is not a valid name of a selector; use at most"):
        write_selector_package(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_name_of_an_installed_selector_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="a selector 'uniform' is installed already"):
        write_selector_package("uniform", tmp_path)


def test_existing_folder_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "mine-selector").mkdir()
    with pytest.raises(ConfigurationError, match="mine-selector exists already; choose another"):
        write_selector_package("mine", tmp_path)
    assert list((tmp_path / "mine-selector").iterdir()) == []


def test_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"can't write .*Not a directory"):
        write_selector_package("mine", tmp_path / "file")
