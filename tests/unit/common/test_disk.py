"""Written data is synced to disk with the call that the system has."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from potluck.common.disk import sync_data


@pytest.mark.parametrize("call", ["fdatasync", "fsync"])
def test_file_is_synced_with_the_call_available_on_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    if call == "fsync":  # as on macOS
        monkeypatch.delattr(os, "fdatasync")
    seen: list[int] = []
    monkeypatch.setattr(os, call, seen.append)
    with (tmp_path / "file").open("wb") as file:
        sync_data(file.fileno())
        assert seen == [file.fileno()]
