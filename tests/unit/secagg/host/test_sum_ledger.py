"""A host's ledger of its clients' sums on disk, also after interrupted writes."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from potluck.common.errors import StorageError
from potluck.secagg.host.sum_ledger import SumLedger
from potluck.secagg.protocol.policy.ledger import Upload

AT = datetime(2026, 5, 4, tzinfo=UTC)


def upload(number: int) -> Upload:
    return Upload(session_id=bytes([number] * 16).hex(), input_id="labels", epsilon=None, at=AT)


def filled(folder: Path, entries: int) -> SumLedger:
    ledger = SumLedger(folder)
    for number in range(entries):
        ledger.keep("a", [upload(number)])
    return ledger


def kept(folder: Path) -> list[Upload]:
    return SumLedger(folder).of("a").uploads


def test_sum_ledger_entries_are_appended_after_a_restart(tmp_path: Path) -> None:
    filled(tmp_path, 2)
    again = SumLedger(tmp_path)
    again.keep("a", [upload(2), upload(3)])
    again.keep("a", [])
    again.keep("b", [upload(9)])
    assert kept(tmp_path) == [upload(number) for number in range(4)]
    assert SumLedger(tmp_path).clients() == ["a", "b"]
    assert SumLedger(tmp_path).of("c").entries == ()


def test_truncated_sum_ledger_line_is_ignored(tmp_path: Path) -> None:
    filled(tmp_path, 3)
    path = tmp_path / "a.jsonl"
    whole = path.read_bytes()
    second = whole.rstrip(b"\n").rfind(b"\n") + 1
    for end in range(second, len(whole)):
        path.write_bytes(whole[:end])
        assert kept(tmp_path) == [upload(0), upload(1)]
        SumLedger(tmp_path).keep("a", [upload(7)])
        assert kept(tmp_path) == [upload(0), upload(1), upload(7)]


@pytest.mark.parametrize("change", ["nothing", "first", "middle", "other", "text"])
def test_damaged_sum_ledger_stops_all_sums(tmp_path: Path, change: str) -> None:
    filled(tmp_path, 3)
    path = tmp_path / "a.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    spoilt = {
        "nothing": [],
        "first": lines[1:],
        "middle": [*lines[:2], lines[2][:-9] + b"\n", lines[3]],
        "other": [b'{"client": "b"}\n', *lines[1:]],
        "text": [b"once upon a time\n"],
    }[change]
    path.write_bytes(b"".join(spoilt))
    with pytest.raises(StorageError, match="restore it from a backup"):
        SumLedger(tmp_path).of("a")


def test_sum_ledger_entry_that_can_not_be_written_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = filled(tmp_path, 1)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", full)
        with pytest.raises(StorageError, match="No space left"):
            ledger.keep("a", [upload(1)])
    assert ledger.of("a").uploads == [upload(0)]
    ledger.keep("a", [upload(2)])
    assert kept(tmp_path) == [upload(0), upload(2)]
