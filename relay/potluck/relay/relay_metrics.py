"""The metrics of a relay: its connection, the hosts behind it, transfers on both sides."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from potluck.common.errors import PotluckError
from potluck.common.monitoring import definitions as metrics
from potluck.common.monitoring.instruments import Instruments, show_certificate, show_disk
from potluck.common.monitoring.metric_labels import (
    DeliveryOutcome,
    Direction,
    MeasuredParty,
    RelayLeg,
    RelaySource,
    known_reason,
)
from potluck.common.net.tls import TlsFiles


class RelayMetrics:
    """Metrics of a relay. Runs on the event loop, except for the lookups at each scrape."""

    def __init__(self, instruments: Instruments | None = None) -> None:
        self.instruments = instruments or Instruments(MeasuredParty.RELAY)
        self._connected = False
        self._hosts = self._clients = 0
        self.connection(stands=False)
        self.attending(0, 0)

    def watch(self, *, state: Path, tls: TlsFiles, held: Callable[[], int]) -> None:
        """Look up disk, certificate and held updates at each scrape. `held`: returns the number of
        held updates.
        """

        def refresh() -> None:
            show_disk(self.instruments, state)
            with suppress(PotluckError):  # the files are being replaced: keep the last value
                show_certificate(self.instruments, tls)
            self.instruments.set(metrics.RELAY_UPDATES_HELD, held())

        self.instruments.refresh_with(refresh)

    def ready(self) -> str:
        """Return the reason that the relay is not ready; empty while it is connected to the
        coordinator."""
        return "" if self._connected else "the relay is not connected to the coordinator"

    def connection(self, *, stands: bool) -> None:
        """Record whether the relay is connected to the coordinator."""
        self._connected = stands
        self.instruments.set(metrics.RELAY_CONNECTED, float(stands))

    def attending(self, hosts: int, clients: int) -> None:
        """Add to the numbers of connected hosts and clients; a negative value subtracts."""
        self._hosts, self._clients = self._hosts + hosts, self._clients + clients
        self.instruments.set(metrics.RELAY_HOSTS, self._hosts)
        self.instruments.set(metrics.RELAY_CLIENTS, self._clients)

    def refused(self, reason: str, _peer: str) -> None:
        """Count a refused call of a host."""
        self.instruments.count(metrics.RELAY_REFUSALS, reason=known_reason(reason))

    def lent(self, source: RelaySource) -> None:
        """Count a host's request for a file, by the file's source: the relay's disk, or the
        coordinator.
        """
        self.instruments.count(metrics.RELAY_DOWNLOADS, source=source)

    def delivered(self, outcome: DeliveryOutcome) -> None:
        """Count the outcome of an update that was held."""
        self.instruments.count(metrics.RELAY_DELIVERIES, outcome=outcome)

    def moved_behind(self, direction: Direction, size: int) -> None:
        """Count bytes of a file that moved between a host and the relay."""
        self._count(RelayLeg.HOSTS, direction, size)

    # Of the link to the coordinator -------------------------------------------------------------

    def moved(self, direction: Direction, size: int) -> None:
        """Count bytes of a file that moved between the relay and the coordinator."""
        self._count(RelayLeg.COORDINATOR, direction, size)

    def retried(self, direction: Direction) -> None:
        """Count a new attempt at a transfer to or from the coordinator."""
        self.instruments.count(metrics.RELAY_RETRIES, direction=direction)

    def _count(self, leg: RelayLeg, direction: Direction, size: int) -> None:
        self.instruments.count(metrics.RELAY_BYTES, size, leg=leg, direction=direction)
