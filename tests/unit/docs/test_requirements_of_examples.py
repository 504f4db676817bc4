"""The examples' own lists of libraries agree with the project's."""

from __future__ import annotations

import tomllib
from typing import Any

from packaging.requirements import Requirement
from support.repository import ROOT


def test_host_requirements_without_torch_match_the_project_dependencies() -> None:
    def requirements(lines: list[str]) -> dict[str, Any]:
        return {each.name: each.specifier for each in map(Requirement, lines)}

    file = ROOT / "examples" / "scikit-learn" / "host-requirements.txt"
    listed = [line for line in file.read_text().splitlines() if not line.startswith("#")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    example = tomllib.loads((file.parent / "pyproject.toml").read_text())["project"]
    wanted = requirements([*project["dependencies"], *example["dependencies"]])
    assert wanted.pop("torch")
    assert requirements(listed) == wanted
