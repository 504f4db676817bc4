"""Metrics of the coordinator as a whole: hosts, transfers, refusals, disk."""

from __future__ import annotations

import os
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import TypeVar

from potluck.common.monitoring import definitions as metrics
from potluck.common.monitoring.instruments import Instruments, show_disk
from potluck.common.monitoring.metric_labels import (
    LATEST_RUNS,
    MOST_AWAY,
    RUN,
    Direction,
    MeasuredParty,
    TransferOutcome,
    known_reason,
)
from potluck.common.net.build_version import software_version
from potluck.common.net.identity import Credential, Role
from potluck.common.net.protocol import PROTOCOL_VERSION, VERSIONS
from potluck.rpc.v1 import operator_pb2
from potluck.server.clock import now, utc
from potluck.server.hosts.attendance import Attendance
from potluck.server.live.run_metrics import RunObserver
from potluck.server.machine.events import RunEnding
from potluck.server.plan.pretraining import is_pretraining

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

_MOST_REMEMBERED = 10_000
"""Maximum number of interrupted transfers that are remembered, to recognise their next attempts.
Also the maximum number of remembered peers."""

_FORGOTTEN = timedelta(days=1)
"""Time after its expiry at which a peer's certificate is no longer shown."""


class Transfer:
    """One attempt to transfer a file."""

    outcome: TransferOutcome | None = TransferOutcome.BROKEN
    moved = 0
    """Bytes of the file that were transferred in this attempt."""
    paused_at = 0
    """Offset in the file at which the last piece ended."""

    def complete(self) -> None:
        """Record that the whole file has arrived or was sent."""
        self.outcome = TransferOutcome.COMPLETED

    def pause(self, at: int) -> None:
        """Record that this stream has transferred its piece of the file. The next piece starts at
        offset `at`, in another stream."""
        self.outcome, self.paused_at = None, at


class CoordinatorMetrics:
    """Metrics of a coordinator. Used on the event loop, except `refresh`, which is thread-safe."""

    def __init__(self, instruments: Instruments, attendance: Attendance, state: Path) -> None:
        self.instruments = instruments
        self._attendance = attendance
        self._state = state
        self._expires: Callable[[], datetime] | None = None
        self._away: Callable[[], Mapping[str, Sequence[str]]] = dict
        self._members_expire: Callable[[], datetime | None] = lambda: None
        self._peers: OrderedDict[tuple[Role, str], datetime] = OrderedDict()
        self._shown_away: set[tuple[str, str]] = set()
        self._shown_peers: set[tuple[Role, str]] = set()
        self._refused_peers: dict[str, str] = {}  # reason → peer last refused
        self._under_way = 0
        self._runs: dict[str, None] = {}
        self._broken: OrderedDict[tuple[str, str, str], None] = OrderedDict()
        self._paused: OrderedDict[tuple[str, str, str], int] = OrderedDict()
        """Offset at which the last piece of a file ended, by direction, peer and file."""
        self._in_flight = dict.fromkeys(Direction, 0)
        for direction in Direction:
            instruments.set(metrics.TRANSFERS_IN_FLIGHT, 0, direction=direction)
        instruments.set(metrics.RUNS_UNDER_WAY, 0)
        instruments.set(metrics.CLIENTS_QUARANTINED, 0)
        instruments.refresh_with(self.refresh)

    def refresh(self) -> None:
        """Set the metrics whose values are read from the current state instead of counted.
        Thread-safe."""
        instruments = self.instruments
        instruments.set(metrics.HOSTS_ATTENDING, self._attendance.host_count)
        instruments.set(metrics.CLIENTS_ATTENDING, len(self._attendance.clients))
        instruments.set(metrics.SPOOL_SIZE, _size(self._state / "spool"))
        show_disk(instruments, self._state)
        self._show_away()
        self._show_peers()
        end = self._members_expire()
        instruments.set(metrics.MEMBER_EXPIRY, None if end is None else end.timestamp())

    def watch_certificate(
        self, expires: Callable[[], datetime], authority_expires: Callable[[], datetime]
    ) -> None:
        """Show when the coordinator's certificate and its authority's certificate expire."""
        self._expires = expires

        def refresh() -> None:
            self.instruments.set(metrics.CERTIFICATE_EXPIRY, expires().timestamp())
            self.instruments.set(metrics.AUTHORITY_EXPIRY, authority_expires().timestamp())

        self.instruments.refresh_with(refresh)

    def watch_members(self, expire: Callable[[], datetime | None]) -> None:
        """Show when the first member record expires. expire: function that returns this time, or
        None without records."""
        self._members_expire = expire

    def watch_runs(self, away: Callable[[], Mapping[str, Sequence[str]]]) -> None:
        """Show the disconnected hosts. away: function that returns their names for each current
        run; must be thread-safe."""
        self._away = away

    def seen(self, credential: Credential) -> None:
        """Record the certificate of a caller."""
        identity = credential.identity
        self._peers[identity.role, identity.name] = credential.expires
        self._peers.move_to_end((identity.role, identity.name))
        if len(self._peers) > _MOST_REMEMBERED:
            self._peers.popitem(last=False)

    def _show_away(self) -> None:
        shown = {
            (run_id, host)
            for run_id, hosts in self._away().items()
            for host in hosts[:MOST_AWAY]
            if run_id in self._runs
        }
        for run_id, host in self._shown_away - shown:
            self.instruments.forget(metrics.RUN_AWAY_HOST, run=run_id, host=host)
        for run_id, host in shown:
            self.instruments.set(metrics.RUN_AWAY_HOST, 1, run=run_id, host=host)
        self._shown_away = shown

    def _show_peers(self) -> None:
        """For each role, show the certificate that expires first. Certificates that expired long
        ago are not shown."""
        since = utc() - _FORGOTTEN
        first: dict[Role, tuple[datetime, str]] = {}
        for (role, name), expires in list(self._peers.items()):
            if expires > since:
                first[role] = min(first.get(role, (expires, name)), (expires, name))
        shown = {(role, f"{role} {name}"): end for role, (end, name) in first.items()}
        for role, peer in self._shown_peers - shown.keys():
            self.instruments.forget(metrics.PEER_EXPIRY, role=role, peer=peer)
        for (role, peer), end in shown.items():
            self.instruments.set(metrics.PEER_EXPIRY, end.timestamp(), role=role, peer=peer)
        self._shown_peers = set(shown)

    def description(self) -> operator_pb2.DescribeCoordinatorResponse:
        """Return the values of the metrics as a message for operators."""
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
        """Return the observer of a run that was started or resumed. Delete the metric series of the
        oldest runs."""
        shown = not is_pretraining(run_id)
        if shown:
            self._runs.pop(run_id, None)
            self._runs[run_id] = None
            for old in list(self._runs)[:-LATEST_RUNS]:
                self._forget(old)
        return RunObserver(self.instruments, run_id, now, shown=shown)

    def failed_at_start(self, run_id: str, at: datetime) -> None:
        """Record that a run could not be resumed at the coordinator's start."""
        self.observer(run_id).ended(RunEnding.FAILED, at)

    def under_way(self, runs: Iterable[str]) -> None:
        """Record the runs that are driven now; a pre-training run is recorded as its main run."""
        self._under_way = sum(not is_pretraining(run_id) for run_id in runs)
        self.instruments.set(metrics.RUNS_UNDER_WAY, self._under_way)

    def _forget(self, run_id: str) -> None:
        del self._runs[run_id]
        for metric in metrics.metrics_of(MeasuredParty.COORDINATOR):
            if RUN in metric.labels:
                self.instruments.forget(metric, run=run_id)

    # Clients and calls ------------------------------------------------------------------------

    def quarantined(self, clients: int) -> None:
        """Record the number of clients in quarantine."""
        self.instruments.set(metrics.CLIENTS_QUARANTINED, clients)

    def refused(self, reason: str, peer: str) -> None:
        """Count a refused call, and record its peer as the last one for the reason."""
        reason = known_reason(reason)
        self.instruments.count(metrics.CALLS_REFUSED, reason=reason)
        before = self._refused_peers.get(reason)
        if peer != before:
            if before is not None:
                self.instruments.forget(metrics.REFUSED_PEER, reason=reason, peer=before)
            self.instruments.set(metrics.REFUSED_PEER, 1, reason=reason, peer=peer)
            self._refused_peers[reason] = peer

    def secure_phase(self, phase: str, seconds: float, dropped: int) -> None:
        """Record the duration of a phase of secure aggregation, and the number of clients that
        dropped out in it."""
        self.instruments.observe(metrics.SECURE_PHASE_SECONDS, seconds, phase=phase)
        self.instruments.count(metrics.SECURE_DROPOUTS, dropped, phase=phase)

    # Transfers --------------------------------------------------------------------------------

    @contextmanager
    def transfer(
        self, direction: Direction, peer: str, file: str, *, offset: int
    ) -> Iterator[Transfer]:
        """Measure the transfer of a file or a part of it. The transfer counts as interrupted unless
        `complete` was called."""
        key = (str(direction), peer, file)
        instruments = self.instruments
        if key in self._broken:
            del self._broken[key]
            instruments.count(metrics.TRANSFERS_RETRIED, direction=direction)
        if offset and offset != self._paused.pop(key, None):
            instruments.count(metrics.TRANSFERS_RESUMED, direction=direction)
        self._count_in_flight(direction, 1)
        transfer = Transfer()
        try:
            yield transfer
        finally:
            self._count_in_flight(direction, -1)
            if transfer.outcome is None:
                _remember(self._paused, key, transfer.paused_at)
            else:
                instruments.count(metrics.TRANSFERS, direction=direction, outcome=transfer.outcome)
            if transfer.outcome is TransferOutcome.BROKEN:
                _remember(self._broken, key, None)
                if not transfer.moved:
                    instruments.count(metrics.TRANSFERS_FRUITLESS, direction=direction)

    def _count_in_flight(self, direction: Direction, change: int) -> None:
        self._in_flight[direction] += change
        self.instruments.set(
            metrics.TRANSFERS_IN_FLIGHT, self._in_flight[direction], direction=direction
        )


def _remember(known: OrderedDict[_Key, _Value], key: _Key, value: _Value) -> None:
    known[key] = value
    if len(known) > _MOST_REMEMBERED:
        known.popitem(last=False)


def _size(folder: str | Path) -> int:
    """Return the number of bytes in all files below a folder. Files may be added and deleted
    meanwhile."""
    total = 0
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    total += _size(entry.path)
                else:
                    total += entry.stat(follow_symlinks=False).st_size
    return total
