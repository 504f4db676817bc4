"""The Weights & Biases sink, offline: the steps that it writes to its folders."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.tracked import FINISHED, ROUNDS, TRACKED

from potluck.integrations.trackers.wandb_sink import Wandb

BLOCK, HEADER = 32_768, struct.Struct("<IHB")
WHOLE, LAST = 1, 4


def records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a .wandb file: LevelDB's log format after seven bytes."""
    position, parts = 7, b""
    while position + HEADER.size <= len(data):
        left = BLOCK - position % BLOCK
        if left < HEADER.size:
            position += left
            continue
        _, length, kind = HEADER.unpack_from(data, position)
        position += HEADER.size
        parts += data[position : position + length]
        position += length
        if kind in (WHOLE, LAST):
            yield parts
            parts = b""


def parsed(folder: Path) -> list[Any]:
    """Return the records of a folder as W&B's messages."""
    from wandb.proto.wandb_internal_pb2 import (
        Record,  # pyright: ignore[reportAttributeAccessIssue]  # made at run time
    )

    [path] = folder.glob("*.wandb")
    return [Record.FromString(data) for data in records(path.read_bytes())]


def steps(folder: Path) -> list[tuple[int, dict[str, float]]]:
    """Return (step, numbers) of each history record."""
    found: list[tuple[int, dict[str, float]]] = []
    for record in parsed(folder):
        if record.HasField("history"):
            numbers = {
                item.key or item.nested_key[0]: json.loads(item.value_json)
                for item in record.history.item
            }
            own = {name: value for name, value in numbers.items() if not name.startswith("_")}
            found.append((record.history.step.num, own))
    return found


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_sink_writes_each_round_as_one_step_after_kills(tmp_path: Path) -> None:
    sink = Wandb(folder=str(tmp_path), rounds=3)
    assert sink.open(TRACKED) == 0
    sink.write(TRACKED, ROUNDS)
    later = Wandb(folder=str(tmp_path))
    (later._draft / "wandb").mkdir(parents=True)  # the state after a kill
    assert later.open(TRACKED) == 3
    later.write(TRACKED, ROUNDS[3:])
    later.end(FINISHED)
    later.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ab12-1-3", "ab12-4-4"]
    runs = [each.run for each in parsed(tmp_path / "ab12-1-3") if each.HasField("run")]
    assert {each.host for each in runs} == {"potluck"}  # not the machine's name
    # Files that are uploaded to a server.
    for path in (*tmp_path.glob("*/*.wandb"), *tmp_path.glob("*/files/*")):
        for own in (sys.executable, str(tmp_path)):
            assert own.encode() not in path.read_bytes(), (path, own)
    assert steps(tmp_path / "ab12-1-3") + steps(tmp_path / "ab12-4-4") == [
        (each.number, each.numbers) for each in ROUNDS
    ]
