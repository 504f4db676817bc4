"""Sinks that write files: each round is recorded once, wherever a kill truncates the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from support.tracked import FINISHED, ROUNDS, TRACKED

from potluck.common.errors import StorageError
from potluck.integrations.trackers.table_sinks import CsvFiles, ParquetFiles
from potluck.integrations.trackers.tensorboard_sink import TensorBoard
from potluck.server.sink import Sink

KINDS: list[Callable[..., Sink]] = [CsvFiles, ParquetFiles, TensorBoard]


def written(kind: Callable[..., Sink], folder: Path) -> Path:
    """Let a sink write all rounds, one after the other; return its file."""
    sink = kind(folder=str(folder))
    assert sink.open(TRACKED) == 0
    for each in ROUNDS:
        sink.write(TRACKED, [each])
    sink.end(FINISHED)
    sink.close()
    [path] = [path for path in folder.rglob("*") if path.is_file()]
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_file_sink_reports_the_last_recorded_round(
    kind: Callable[..., Sink], tmp_path: Path
) -> None:
    written(kind, tmp_path)
    later = kind(folder=str(tmp_path))
    assert later.open(TRACKED) == 4
    later.end(FINISHED)
    assert later.open(TRACKED) == 4


@pytest.mark.parametrize("kind", [CsvFiles, TensorBoard])
def test_file_truncated_at_any_byte_is_completed(kind: Callable[..., Sink], tmp_path: Path) -> None:
    path = written(kind, tmp_path)
    whole = path.read_bytes()
    for length in range(0, len(whole), 13):  # steps of 13: each try syncs to disk
        path.write_bytes(whole[:length])
        sink = kind(folder=str(tmp_path))
        last = sink.open(TRACKED)
        assert last is not None
        sink.write(TRACKED, ROUNDS[last:])
        assert path.read_bytes() == whole, length


@pytest.mark.parametrize("kind", KINDS)
def test_file_removed_during_a_run_is_created_again(
    kind: Callable[..., Sink], tmp_path: Path
) -> None:
    path = written(kind, tmp_path / "whole")
    sink = kind(folder=str(tmp_path / "removed"))
    sink.open(TRACKED)
    sink.write(TRACKED, ROUNDS[:3])
    [removed] = [path for path in (tmp_path / "removed").rglob("*") if path.is_file()]
    removed.unlink()
    try:
        sink.write(TRACKED, ROUNDS[3:])
    except FileNotFoundError:  # the feed then opens the sink again
        last = sink.open(TRACKED)
        assert last is not None
        sink.write(TRACKED, ROUNDS[last:])
    assert removed.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_sink_table_has_the_columns_of_an_export(suffix: str, tmp_path: Path) -> None:
    path = written(CsvFiles if suffix == "csv" else ParquetFiles, tmp_path)
    assert path.name == f"ab12.{suffix}"
    table = pd.read_csv(path) if suffix == "csv" else pd.read_parquet(path)
    assert table["round"].tolist() == [1, 2, 3, 4]
    assert table["bytes_down"].tolist() == [each.bytes_down for each in ROUNDS]
    assert table["seconds"].tolist() == [each.seconds for each in ROUNDS]
    assert table["loss"].isna().tolist() == [True, False, True, False]
    assert table["loss"].iloc[1] == 0.5
    assert table["model"].iloc[3] == ROUNDS[3].model


def test_unrelated_file_is_not_overwritten_by_a_sink(tmp_path: Path) -> None:
    (tmp_path / "ab12.csv").write_text("name,age\nx,1\n")
    with pytest.raises(StorageError, match="must be 'round'; move the file to another folder"):
        CsvFiles(folder=str(tmp_path)).open(TRACKED)


def test_tensorboard_reads_the_written_events(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    path = written(TensorBoard, tmp_path)
    assert path.parent.name == "digits__twice-ab12"
    events = EventAccumulator(str(path.parent)).Reload()
    assert [each.step for each in events.Scalars("seconds")] == [1, 2, 3, 4]
    losses = [(each.step, each.value, each.wall_time) for each in events.Scalars("loss")]
    assert losses == [(n, 1 / n, ROUNDS[n - 1].committed_at.timestamp()) for n in (2, 4)]
