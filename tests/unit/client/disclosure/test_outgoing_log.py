"""The log of answers, evaluations, updates and failures: complete and in order after kills."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from potluck.client.disclosure import outgoing_log
from potluck.client.disclosure.outgoing_log import Outgoing, OutgoingLog, shortened
from potluck.common.errors import StorageError
from potluck.rpc.v1 import coordinator_pb2 as rpc


def instruction(round_number: int, client: str = "client-0") -> rpc.Instruction:
    return rpc.Instruction(client_id=client, run_id="r", round=round_number)


def noted(log: OutgoingLog, *rounds: int) -> None:
    for number in rounds:
        log.note(instruction(number), Outgoing.ANSWER, question="loss", numbers={"loss": 0.5})


def rounds_in(folder: Path) -> list[int]:
    return [int(entry["round"]) for entry in OutgoingLog(folder).entries("client-0")]


def test_log_entry_contains_the_sent_values_and_the_recipient(tmp_path: Path) -> None:
    log = OutgoingLog(tmp_path, federation="f", coordinator="here:7443")
    log.note(instruction(3), Outgoing.UPDATE, bytes=7, report={"samples": 61})
    [entry] = OutgoingLog(tmp_path).entries("client-0")
    assert entry["at"].endswith("+00:00")
    assert {name: value for name, value in entry.items() if name != "at"} == {
        "kind": "update",
        "federation": "f",
        "coordinator": "here:7443",
        "run": "r",
        "round": 3,
        "bytes": 7,
        "report": {"samples": 61},
    }
    assert log.clients() == ["client-0"]
    assert list(log.entries("client-1")) == []


def test_truncated_log_line_does_not_affect_the_others(tmp_path: Path) -> None:
    noted(OutgoingLog(tmp_path), 1, 2)
    path = tmp_path / "client-0.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    noted(OutgoingLog(tmp_path), 3, 4)
    assert rounds_in(tmp_path) == [1, 3, 4]


def test_full_log_files_are_compressed_without_losing_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outgoing_log, "LARGEST_BYTES", 1000)
    noted(OutgoingLog(tmp_path), *range(60))
    noted(OutgoingLog(tmp_path), *range(60, 120))
    packed = sorted(path.name for path in (tmp_path / "client-0").iterdir())
    assert len(packed) > 10
    assert all(name.endswith(".jsonl.gz") for name in packed)
    assert (tmp_path / "client-0.jsonl").stat().st_size <= 1000
    assert rounds_in(tmp_path) == list(range(120))
    assert OutgoingLog(tmp_path).clients() == ["client-0"]


def test_kill_during_log_compression_loses_no_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outgoing_log, "LARGEST_BYTES", 1000)
    noted(OutgoingLog(tmp_path), *range(20))
    folder = tmp_path / "client-0"
    first = folder / "1.jsonl.gz"
    content = gzip.decompress(first.read_bytes())
    (folder / "1.jsonl").write_bytes(content)  # killed after compression, before deletion
    assert rounds_in(tmp_path) == list(range(20))
    first.unlink()  # killed during compression
    (folder / "1.jsonl.new").write_bytes(b"half")
    noted(OutgoingLog(tmp_path), *range(20, 40))
    assert rounds_in(tmp_path) == list(range(40))


def test_log_that_can_not_be_written_raises_an_error_before_sending(tmp_path: Path) -> None:
    (tmp_path / "client-0.jsonl").mkdir()
    with pytest.raises(StorageError, match=r"can't write .*client-0\.jsonl"):
        noted(OutgoingLog(tmp_path), 1)


def test_damaged_log_file_is_named_in_the_error(tmp_path: Path) -> None:
    folder = tmp_path / "client-0"
    folder.mkdir()
    (folder / "1.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(StorageError, match=r"can't read .*1\.jsonl\.gz"):
        list(OutgoingLog(tmp_path).entries("client-0"))


def test_long_text_from_the_coordinator_is_truncated() -> None:
    assert shortened("x" * 2000) == "x" * 2000
    assert shortened("x" * 5000) == "x" * 1999 + "…"


def test_log_lines_are_json(tmp_path: Path) -> None:
    noted(OutgoingLog(tmp_path), 1)
    [text] = (tmp_path / "client-0.jsonl").read_text().splitlines()
    assert json.loads(text)["numbers"] == {"loss": 0.5}
