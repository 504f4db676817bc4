"""Metrics of a run's model on its task's evaluation data."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from potluck.common.errors import ConfigurationError
from potluck.common.run_file.runfile import RunFile
from potluck.common.tasks.digits import Digits
from potluck.federation import model_report
from potluck.federation.session_plugins import SessionPlugins


class Unmeasured(Digits):
    def evaluation_data(self, data: Path | None) -> None:
        return None


def test_task_without_evaluation_data_is_refused_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = SimpleNamespace(task=Unmeasured())
    monkeypatch.setattr(model_report, "trained_model", lambda *_: loaded)
    run = RunFile.model_validate({"task": {"name": "digits"}})
    with pytest.raises(
        ConfigurationError, match=r"on this machine; name .* --data .*, or use `pot"
    ):
        model_report.evaluated_model(tmp_path, run, SessionPlugins(), None)
