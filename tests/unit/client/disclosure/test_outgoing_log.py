"""The log of answers, evaluations, updates and failures: whole, in order, whatever happens."""

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


def test_an_entry_says_what_was_sent_and_to_whom(tmp_path: Path) -> None:
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


def test_a_line_that_a_power_failure_cut_spoils_no_other(tmp_path: Path) -> None:
    noted(OutgoingLog(tmp_path), 1, 2)
    path = tmp_path / "client-0.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    noted(OutgoingLog(tmp_path), 3, 4)
    assert rounds_in(tmp_path) == [1, 3, 4]


def test_full_files_are_packed_and_nothing_is_dropped(
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


def test_a_process_killed_while_it_packs_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outgoing_log, "LARGEST_BYTES", 1000)
    noted(OutgoingLog(tmp_path), *range(20))
    folder = tmp_path / "client-0"
    first = folder / "1.jsonl.gz"
    content = gzip.decompress(first.read_bytes())
    (folder / "1.jsonl").write_bytes(content)  # packed, and not yet removed
    assert rounds_in(tmp_path) == list(range(20))
    first.unlink()  # not yet packed
    (folder / "1.jsonl.new").write_bytes(b"half")
    noted(OutgoingLog(tmp_path), *range(20, 40))
    assert rounds_in(tmp_path) == list(range(40))


def test_what_can_t_be_written_is_not_sent(tmp_path: Path) -> None:
    (tmp_path / "client-0.jsonl").mkdir()
    with pytest.raises(StorageError, match=r"can't write .*client-0\.jsonl"):
        noted(OutgoingLog(tmp_path), 1)


def test_a_damaged_part_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "client-0"
    folder.mkdir()
    (folder / "1.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(StorageError, match=r"can't read .*1\.jsonl\.gz"):
        list(OutgoingLog(tmp_path).entries("client-0"))


def test_texts_of_others_are_cut() -> None:
    assert shortened("x" * 2000) == "x" * 2000
    assert shortened("x" * 5000) == "x" * 1999 + "…"


def test_lines_are_json(tmp_path: Path) -> None:
    noted(OutgoingLog(tmp_path), 1)
    [text] = (tmp_path / "client-0.jsonl").read_text().splitlines()
    assert json.loads(text)["numbers"] == {"loss": 0.5}
