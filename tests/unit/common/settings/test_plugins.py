"""Plug-ins that are installed while a process runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from potluck.common.errors import PluginError
from potluck.common.settings import plugins
from potluck.common.task import Task
from potluck.server.plan.compatibility import check_installed


def install(folder: Path) -> None:
    """Install a plug-in as pip does: a module, and its metadata with the entry points."""
    (folder / "late_tasks.py").write_text("class Late:\n    pass\n")
    information = folder / "late_tasks-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: late-tasks\nVersion: 1\n")
    (information / "entry_points.txt").write_text("[potluck.tasks]\nlate = late_tasks:Late\n")


def test_error_about_a_misspelt_plugin_name_suggests_the_correct_one() -> None:
    with pytest.raises(PluginError, match=r"'digit' is not installed \(did you mean 'digits'"):
        plugins.find(plugins.TASKS, "digit")


def test_error_about_a_plugin_installed_after_the_start_asks_for_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    with pytest.raises(PluginError, match=r"'late' is not installed; installed: .*digits"):
        plugins.create(Task, "late", {})
    install(tmp_path)
    said = "potluck.tasks: 'late' was installed after this process had started; restart the process"
    for look_up in (
        lambda: plugins.create(Task, "late", {}),
        lambda: check_installed(plugins.TASKS, "late"),
    ):
        with pytest.raises(PluginError) as caught:
            look_up()
        assert caught.value.message == said
