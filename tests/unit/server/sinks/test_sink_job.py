"""`[sinks.NAME]` tables: what the coordinator refuses when it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from potluck.common.errors import PotluckError
from potluck.common.settings.old_spelling import OldSpellingWarning
from potluck.integrations.trackers.mlflow_sink import Mlflow
from potluck.server.sinks.sink_job import sink_jobs


def jobs(tmp_path: Path, **tables: dict[str, Any]) -> Any:
    return sink_jobs(tables, database="sqlite:///x", state_directory=tmp_path)


def test_sink_table_name_is_the_default_plugin(tmp_path: Path) -> None:
    first, second = jobs(
        tmp_path, csv={"folder": "tables"}, mine={"plugin": "csv", "silence_timeout_seconds": 5}
    )
    assert (first.plugin, first.options) == ("csv", {"folder": "tables"})
    assert (second.plugin, second.options) == ("csv", {})
    assert (first.silence_timeout_seconds, second.silence_timeout_seconds) == (120, 5)
    assert second.folder == tmp_path / "sinks" / "mine"


def test_sink_key_under_its_old_name_is_accepted_with_a_warning(tmp_path: Path) -> None:
    with pytest.warns(OldSpellingWarning, match="'patience_seconds' is written 'silence_timeout"):
        [job] = jobs(tmp_path, csv={"patience_seconds": 5})
    assert (job.silence_timeout_seconds, job.options) == (5, {})


@pytest.mark.parametrize(
    ("name", "table", "why"),
    [
        ("nope", {}, r"\[sinks.nope\]: potluck.sinks: 'nope' is not installed; installed: csv, ml"),
        ("csv", {"folder": 3}, r"\[sinks.csv\]: sink csv: option 'folder' is 3; it must be a text"),
        ("csv", {"foldr": "x"}, r"there is no option 'foldr' \(did you mean 'folder'\?\)"),
        ("../x", {"plugin": "csv"}, "may contain only letters"),
        ("csv", {"plugin": 3}, "plugin is 3, but must be a text"),
        ("csv", {"silence_timeout_seconds": 0}, "seconds is 0, but must be a number above 0"),
        ("csv", {"silence_timeout_seconds": float("inf")}, "seconds is inf, but must be a numb"),
        ("csv", {"silence_timeout_seconds": float("nan")}, "seconds is nan, but must be a numb"),
    ],
)
def test_invalid_sink_table_is_refused(
    tmp_path: Path, name: str, table: dict[str, Any], why: str
) -> None:
    with pytest.raises(PotluckError, match=why):
        jobs(tmp_path, **{name: table})


def test_two_sinks_of_one_plugin_with_the_same_folder_are_refused(tmp_path: Path) -> None:
    shared = {"folder": f"{tmp_path}/shared/"}
    why = rf"\[sinks.wandb\] and \[sinks.mine\] both record to {tmp_path}/shared; give each sink"
    with pytest.raises(PotluckError, match=why):
        jobs(tmp_path, wandb=shared, mine={"plugin": "wandb", "project": "tea", **shared})
    with pytest.raises(PotluckError, match="both record to"):
        jobs(tmp_path, csv={}, mine={"plugin": "csv", "folder": "../csv"})
    assert len(jobs(tmp_path, csv=shared, parquet=shared, mine={"plugin": "csv"})) == 3


@pytest.mark.parametrize("library", ["mlflow_that_is_not_there", "not_there.mlflow"])
def test_missing_sink_library_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    monkeypatch.setattr(Mlflow, "library", library)
    why = rf"\[sinks.mlflow\]: {library} is not installed; .* pip install '\.\[mlflow\]'"
    with pytest.raises(PotluckError, match=why):
        jobs(tmp_path, mlflow={})
