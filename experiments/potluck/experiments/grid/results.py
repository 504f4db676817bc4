"""Results of cells: one file per finished cell, written whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from potluck.common.errors import ConfigurationError, StorageError
from potluck.common.process.folder_lock import FolderLock
from potluck.common.run_file.runfile import RunFile, stored_values
from potluck.deploy.view.run_summary import CoverageSummary
from potluck.experiments.grid.grid_cells import Cell

SAMPLES = "samples"
LABEL_ENTROPY = "label entropy, bits"
WRONG_LABELS = "wrong labels"
RARE_CLASSES = "rare classes"
RARE_GROUPS = "rare groups"
SECONDS = "seconds per sample"
DROP_OUTS = "chance to drop out"
"""Names of clients' traits. The two about rare kinds (classes or groups) are shares of a client's
samples."""


class RoundResult(BaseModel):
    """A committed round. Metrics are shares in [0, 1]; None if not evaluated.

    entropy: in bits, of the combined true labels of the included clients. downloads: number of
    clients that received the model, to answer a question or to train. simulated_seconds: duration
    of the round on a virtual clock; None on a real clock. worst_tenth: mean accuracy of the worst
    tenth of the clients, each on its held-out data; None if `evaluation.spread` is off. coverage:
    clients and samples behind metrics and `worst_tenth`, by name; empty in results of earlier
    versions.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    round: int
    selected: list[str]
    included: list[str]
    accuracy: float | None
    worst_group_accuracy: float | None
    weighted_f1: float | None
    loss: float | None
    entropy: float
    bytes_down: int
    bytes_up: int
    downloads: int = 0
    simulated_seconds: float | None = None
    worst_tenth: float | None = None
    coverage: dict[str, CoverageSummary] = {}

    def is_partial(self, metric: str) -> bool:
        """Return True if a metric is over fewer clients than the run requires."""
        return metric in self.coverage and self.coverage[metric].partial


class Before(BaseModel):
    """Costs of a run before its first round.

    They are the costs of pre-training and of sending the model with which clients estimate
    triplets. bytes: bytes that would be sent if each client were on its own machine. seconds:
    simulated seconds of pre-training; 0 on a real clock.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    bytes: int = 0
    seconds: float = 0.0


class Timings(BaseModel):
    """Durations of a cell, in seconds; not part of its result, since they vary."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rounds: list[float] = Field(description="Seconds from selection to commit, by round.")
    total: float = Field(description="Seconds of all rounds and of the federation's start.")


class CellResult(BaseModel):
    """A finished cell.

    model_blake3: digest of the last model; runs with equal digests have the same model. version:
    the version of Potluck that ran the cell; empty in results of earlier versions. model_bytes:
    size of the tensors sent to a client; 0 if it was not recorded. strategy_bytes: size of the
    tensors that the strategy sends in addition to each client that trains, as SCAFFOLD does.
    traits: one number per client, client-0 first, by name; the experiment knows these numbers, and
    the coordinator does not. epsilon: largest privacy loss of a client by profiles with noise; 0
    without any; None if an exact profile was disclosed, or in results of earlier versions.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    labels: dict[str, str]
    digest: str
    run_file: str
    clients: int
    hosts: int
    rounds: list[RoundResult]
    model_blake3: str
    version: str = ""
    timings: Timings
    model_bytes: int = 0
    strategy_bytes: int = 0
    before: Before = Before()
    traits: dict[str, list[float]] = {}
    epsilon: float | None = None

    @property
    def stopped_early(self) -> bool:
        """True if `[stop]` of the run file ended the run before its last round."""
        values = stored_values(self.run_file)
        planned = values.get("rounds", RunFile.model_fields["rounds"].default)
        return "stop" in values and len(self.rounds) < planned


class ResultsFolder:
    """The folder of an experiment: finished cells are in `cells`, running ones in `running`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cells = folder / "cells"
        self.running = folder / "running"

    def opened(self) -> FolderLock:
        """Make the folder, and lock it while cells run.

        Raises ConfigurationError if another process runs cells in it, StorageError if it can't be
        made.
        """
        try:
            for each in (self.cells, self.running):
                each.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"can't create the folder {self.folder}: {error.strerror}; name another folder "
                "with --output",
                path=self.folder,
            ) from None
        return FolderLock(
            self.folder,
            holder="experiment",
            remedy="wait until the other command ends or stop it, or name another folder with "
            "--output",
        )

    def check_data(self, digests: Mapping[str, str]) -> None:
        """Note the digests of the data that the cells read; their digests leave the data out.

        digests: SHA-256 by name. Raises ConfigurationError if finished cells read other data.
        """
        path = self.folder / "data.json"
        try:
            known = json.loads(path.read_bytes()) if path.exists() else {}
        except (OSError, ValueError) as error:
            raise StorageError(f"can't read {path} ({error}); remove the file", path=path) from None
        other = [name for name, digest in digests.items() if known.get(name, digest) != digest]
        if other and any(self.cells.iterdir()):
            raise ConfigurationError(
                f"{self.folder} has finished cells of other data than your {', '.join(other)}; "
                "name another folder with --output, or restore the data",
                folder=self.folder,
            )
        path.write_text(json.dumps({**known, **digests}, indent=1) + "\n", encoding="utf-8")

    def workplace(self, cell: Cell) -> Path:
        """Return the folder of a running cell's federation."""
        return self.running / cell.digest

    def find(self, cell: Cell) -> CellResult | None:
        """Return the result of a finished cell, with its current labels, or None if unfinished."""
        path = self._path(cell)
        try:
            kept = CellResult.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as error:
            raise StorageError(
                f"can't read {path} as the result of a cell ({type(error).__name__}); remove the "
                "file, and the cell will run again",
                path=path,
            ) from error
        return kept.model_copy(update={"labels": dict(cell.labels)})

    def keep(self, cell: Cell, result: CellResult) -> None:
        """Write a finished cell to disk, synced; after a crash, the file is complete or missing."""
        path = self._path(cell)
        partial = path.with_suffix(".partial")
        with partial.open("w", encoding="utf-8") as file:
            file.write(result.model_dump_json(indent=1))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)

    def finished(self, cells: Iterable[Cell]) -> dict[str, CellResult]:
        """Return the results of the finished cells, by digest."""
        return {cell.digest: result for cell in cells if (result := self.find(cell)) is not None}

    def _path(self, cell: Cell) -> Path:
        return self.cells / f"{cell.digest}.json"
