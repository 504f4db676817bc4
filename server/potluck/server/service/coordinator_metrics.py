"""Metrics of the coordinator as a whole: hosts, transfers, refusals, disk."""

from __future__ import annotations

import os
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from potluck.common.monitoring import definitions as metrics
from potluck.common.monitoring.instruments import Instruments
from potluck.common.monitoring.metric_labels import (
    LATEST_RUNS,
    RUN,
    Direction,
    MeasuredParty,
    TransferOutcome,
    known_reason,
)
from potluck.common.monitoring.process_metrics import show_disk
from potluck.common.net.build_version import software_version
from potluck.common.net.protocol import PROTOCOL_VERSION, VERSIONS
from potluck.rpc.v1 import operator_pb2
from potluck.server.clock import now, utc
from potluck.server.hosts.attendance import Attendance
from potluck.server.rounds.pretraining import is_pretraining
from potluck.server.watching.run_metrics import RunObserver

_MOST_REMEMBERED = 10_000
"""Transfers that broke off, remembered so that another attempt is known for one."""


class Transfer:
    """One attempt to move a file."""

    outcome = TransferOutcome.BROKEN
    moved = 0
    """Bytes of it in this attempt."""

    def complete(self) -> None:
        """All of it is there, or handed over."""
        self.outcome = TransferOutcome.COMPLETED


class CoordinatorMetrics:
    """Lives on the event loop, but for `refresh`, which any thread calls that reads the metrics."""

    def __init__(self, instruments: Instruments, attendance: Attendance, state: Path) -> None:
        self.instruments = instruments
        self._attendance = attendance
        self._state = state
        self._expires: Callable[[], datetime] | None = None
        self._under_way = 0
        self._runs: dict[str, None] = {}
        self._broken: OrderedDict[tuple[str, str, str], None] = OrderedDict()
        self._in_flight = dict.fromkeys(Direction, 0)
        for direction in Direction:
            instruments.set(metrics.TRANSFERS_IN_FLIGHT, 0, direction=direction)
        instruments.set(metrics.RUNS_UNDER_WAY, 0)
        instruments.set(metrics.CLIENTS_QUARANTINED, 0)
        instruments.refresh_with(self.refresh)

    def refresh(self) -> None:
        """Set the figures that are looked up instead of counted. Thread-safe."""
        instruments = self.instruments
        instruments.set(metrics.HOSTS_ATTENDING, self._attendance.host_count)
        instruments.set(metrics.CLIENTS_ATTENDING, len(self._attendance.clients))
        instruments.set(metrics.SPOOL_SIZE, _size(self._state / "spool"))
        show_disk(instruments, self._state)

    def watch_certificate(self, expires: Callable[[], datetime]) -> None:
        """Show when the certificate that is shown to others expires."""
        self._expires = expires
        self.instruments.refresh_with(
            lambda: self.instruments.set(metrics.CERTIFICATE_EXPIRY, expires().timestamp())
        )

    def description(self) -> operator_pb2.DescribeCoordinatorResponse:
        """The same figures for an operator who asks."""
        usage = shutil.disk_usage(self._state)
        described = operator_pb2.DescribeCoordinatorResponse(
            software_version=software_version(),
            protocol_version=PROTOCOL_VERSION,
            versions=VERSIONS,
            disk_free_bytes=usage.free,
            disk_size_bytes=usage.total,
            hosts_attending=self._attendance.host_count,
            clients_attending=len(self._attendance.clients),
            runs_under_way=self._under_way,
        )
        described.time.FromDatetime(utc())
        if self._expires is not None:
            described.certificate_expires_at.FromDatetime(self._expires())
        return described

    # Runs -------------------------------------------------------------------------------------

    def observer(self, run_id: str) -> RunObserver:
        """Of a run that begins or goes on; the series of the oldest runs make room."""
        shown = not is_pretraining(run_id)
        if shown:
            self._runs.pop(run_id, None)
            self._runs[run_id] = None
            for old in list(self._runs)[:-LATEST_RUNS]:
                self._forget(old)
        return RunObserver(self.instruments, run_id, now, shown=shown)

    def under_way(self, runs: Iterable[str]) -> None:
        """These runs are driven now; pre-training is part of the run that it is for."""
        self._under_way = sum(not is_pretraining(run_id) for run_id in runs)
        self.instruments.set(metrics.RUNS_UNDER_WAY, self._under_way)

    def _forget(self, run_id: str) -> None:
        del self._runs[run_id]
        for metric in metrics.metrics_of(MeasuredParty.COORDINATOR):
            if RUN in metric.labels:
                self.instruments.forget(metric, run=run_id)

    # Clients and calls ------------------------------------------------------------------------

    def quarantined(self, clients: int) -> None:
        """So many clients are in quarantine."""
        self.instruments.set(metrics.CLIENTS_QUARANTINED, clients)

    def refused(self, reason: str) -> None:
        """A call was refused."""
        self.instruments.count(metrics.CALLS_REFUSED, reason=known_reason(reason))

    def secure_phase(self, phase: str, seconds: float, dropped: int) -> None:
        """A phase of secure aggregation is over; so many clients dropped out in it."""
        self.instruments.observe(metrics.SECURE_PHASE_SECONDS, seconds, phase=phase)
        self.instruments.count(metrics.SECURE_DROPOUTS, dropped, phase=phase)

    # Transfers --------------------------------------------------------------------------------

    @contextmanager
    def transfer(
        self, direction: Direction, peer: str, file: str, *, offset: int
    ) -> Iterator[Transfer]:
        """A file is on its way; broken off unless it is said to be complete."""
        key = (str(direction), peer, file)
        instruments = self.instruments
        if key in self._broken:
            del self._broken[key]
            instruments.count(metrics.TRANSFERS_RETRIED, direction=direction)
        if offset:
            instruments.count(metrics.TRANSFERS_RESUMED, direction=direction)
        self._count_in_flight(direction, 1)
        transfer = Transfer()
        try:
            yield transfer
        finally:
            self._count_in_flight(direction, -1)
            instruments.count(metrics.TRANSFERS, direction=direction, outcome=transfer.outcome)
            if transfer.outcome is TransferOutcome.BROKEN:
                self._broken[key] = None
                if len(self._broken) > _MOST_REMEMBERED:
                    self._broken.popitem(last=False)

    def _count_in_flight(self, direction: Direction, change: int) -> None:
        self._in_flight[direction] += change
        self.instruments.set(
            metrics.TRANSFERS_IN_FLIGHT, self._in_flight[direction], direction=direction
        )


def _size(folder: str | Path) -> int:
    """Bytes of all files below a folder; files may come and go meanwhile."""
    total = 0
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    total += _size(entry.path)
                else:
                    total += entry.stat(follow_symlinks=False).st_size
    return total
