"""The sink shown in docs/guides/trackers.md works as printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.repository import ROOT
from support.tracked import ROUNDS, TRACKED


def test_sink_of_the_trackers_guide_records_each_round_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs/guides/trackers.md").read_text()
    [source] = re.findall(r"```python\n(# chat_sink.py\n.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {"__name__": "chat_sink"}
    exec(compile(source, "chat_sink.py", "exec"), names)  # noqa: S102  # of our own page
    monkeypatch.chdir(tmp_path)
    sink = names["Chat"]()
    assert sink.open(TRACKED) == 0
    sink.write(TRACKED, ROUNDS[:2])
    assert names["Chat"]().open(TRACKED) == 2
    sink.write(TRACKED, ROUNDS[2:])
    lines = (tmp_path / "chat.txt").read_text().splitlines()
    assert lines == ["ab12 1 None", "ab12 2 0.75", "ab12 3 None", "ab12 4 0.75"]
