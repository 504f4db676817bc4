"""The parts of the coordinator that a run works with."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from potluck.server.eligibility.collected_sums import SumCollector
from potluck.server.hosts.attendance import Attendance
from potluck.server.profiles.trust import Trust
from potluck.server.store import RoundRow
from potluck.server.store.model_files import ModelFiles
from potluck.server.store.store_thread import InStore
from potluck.server.training.training_job import Workplace
from potluck.server.watching.run_metrics import RunObserver
from potluck.server.watching.run_spans import RunSpans


@dataclass(kw_only=True)
class RunServices:
    """The parts of the coordinator that a run works with."""

    attendance: Attendance
    files: ModelFiles
    in_store: InStore
    tidy: Callable[[int], Awaitable[None]]
    """Delete model files that no run needs any more, now that this round is committed."""
    note_commit: Callable[[RoundRow], Awaitable[None]]
    """Note beside the store that a round was committed."""
    pretrain: Callable[[str], Awaitable[str | None]]
    """Train a model before round 1; digests in and out. None where the operator stops it."""
    offended: Callable[[Iterable[str]], Awaitable[dict[str, str]]]
    """See `Offences.add`."""
    workplace: Workplace
    """Settings for trainings on the coordinator."""
    trust: Trust
    sums: SumCollector | None
    """Collects sums that hide what each client has; None if secure aggregation is not installed."""
    observer: RunObserver
    """Takes what happens, for the metrics."""
    spans: RunSpans | None
    """Takes it for traces, where there are any."""
