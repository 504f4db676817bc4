"""The parts of the coordinator that a run works with."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from potluck.server.eligibility.collected_sums import SumCollector
from potluck.server.hosts.attendance import Attendance
from potluck.server.live.run_metrics import RunObserver
from potluck.server.live.run_spans import RunSpans
from potluck.server.profiles.trust import Trust
from potluck.server.reduce.server_training import TrainingProcess
from potluck.server.store import RoundRow
from potluck.server.store.model_files import ModelFiles
from potluck.server.store.store_thread import InStore


@dataclass(kw_only=True)
class RunServices:
    """Parts of the coordinator that every run uses: hosts, files, store, trust, metrics,
    callbacks."""

    attendance: Attendance
    files: ModelFiles
    state_directory: Path
    """Folder of the coordinator's state, which backups contain."""
    epsilon_over_runs: float | None
    """See `CoordinatorConfig.epsilon_over_runs`."""
    in_store: InStore
    tidy: Callable[[int], Awaitable[None]]
    """Delete model files that are not needed after the commit of the round with the given
    number."""
    note_commit: Callable[[RoundRow], Awaitable[None]]
    """Record a committed round in the journal, outside the database."""
    pretrain: Callable[[str], Awaitable[str | None]]
    """Train a model before round 1. Takes the digest of the first model and returns that of the
    trained one; None if an operator stops the training."""
    offended: Callable[[Iterable[str]], Awaitable[dict[str, str]]]
    """Count an offence of each client; return those now in quarantine, each with the reason."""
    training: TrainingProcess
    """Trains on the coordinator, if the run's strategy does so."""
    trust: Trust
    sums: SumCollector | None
    """Collects secure sums of label counts; None if secure aggregation is not installed."""
    observer: RunObserver
    """Receives events of runs, for the metrics."""
    spans: RunSpans | None
    """Receives events for execution traces; None if tracing is off."""
