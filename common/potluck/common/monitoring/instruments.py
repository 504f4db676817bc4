"""Sets and returns the metrics that `definitions.py` defines. Each `Instruments` has its own
registry, so that two of them in one process don't mix."""

from __future__ import annotations

import platform
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import product
from pathlib import Path

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from potluck.common.monitoring.definitions import (
    BUILD_INFO,
    CERTIFICATE_EXPIRY,
    CLOCK,
    DISK_FREE,
    DISK_SIZE,
    SECONDS,
    Metric,
    MetricKind,
    metrics_of,
)
from potluck.common.monitoring.metric_labels import MeasuredParty
from potluck.common.net.build_version import software_version
from potluck.common.net.tls import TlsFiles

# Instruments --------------------------------------------------------------------------------------

_Family = Counter | Gauge | Histogram


class Instruments:
    """The metrics of one process. Thread-safe.

    Counters and histograms whose labels are known beforehand start at 0. A gauge is shown once it
    has a value.
    """

    def __init__(self, party: MeasuredParty) -> None:
        self._registry = CollectorRegistry()
        self._metrics: Mapping[Metric, _Family] = {
            metric: _made(metric, self._registry) for metric in metrics_of(party)
        }
        # Keys of the two collections below are names of metrics, because hashing a metric is slow:
        # the hash covers all fields, such as the help text.
        self._set: set[tuple[str, tuple[str, ...]]] = set()
        self._children: dict[tuple[str, tuple[tuple[str, str], ...]], _Family] = {}
        self._refreshers: list[Callable[[], None]] = []
        # Adds memory, CPU seconds, open files and start of the process, under Prometheus's usual
        # names.
        ProcessCollector(registry=self._registry)
        self.set(
            BUILD_INFO, 1, party=party, version=software_version(), python=platform.python_version()
        )

    def count(self, metric: Metric, by: float = 1.0, **labels: str) -> None:
        """Increase a counter."""
        family = self._labelled(metric, labels)
        assert isinstance(family, Counter)  # noqa: S101  # a mistake in the code, not at run time
        family.inc(by)

    def set(self, metric: Metric, value: float | None, **labels: str) -> None:
        """Set a gauge to a new value; None removes it."""
        if value is None:
            self.forget(metric, **labels)
            return
        family = self._labelled(metric, labels)
        assert isinstance(family, Gauge)  # noqa: S101  # a gauge, as declared
        family.set(value)
        self._set.add((metric.name, tuple(labels[label.name] for label in metric.labels)))

    def observe(self, metric: Metric, value: float, **labels: str) -> None:
        """Add a value to a histogram."""
        family = self._labelled(metric, labels)
        assert isinstance(family, Histogram)  # noqa: S101  # likewise
        family.observe(max(value, 0.0))

    def forget(self, metric: Metric, **labels: str) -> None:
        """Remove every series of a gauge that has these labels."""
        names = [label.name for label in metric.labels]
        for key in list(self._set):
            values = key[1]
            if (
                key[0] == metric.name
                and labels.items() <= dict(zip(names, values, strict=True)).items()
            ):
                self._set.discard(key)
                if values:
                    self._metrics[metric].remove(*values)
        self._children.clear()

    def refresh_with(self, refresh: Callable[[], None]) -> None:
        """Call `refresh` at each scrape, in any thread; it must be quick."""
        self._refreshers.append(refresh)

    def exposition(self) -> bytes:
        """Return all metrics, in the text format of Prometheus."""
        self.set(CLOCK, time.time())
        for refresh in self._refreshers:
            refresh()
        return generate_latest(_Shown(self._registry, self._unset))

    def _labelled(self, metric: Metric, labels: Mapping[str, str]) -> _Family:
        key = (metric.name, tuple(labels.items()))
        child = self._children.get(key)
        if child is None:
            family = self._metrics[metric]
            child = family.labels(**labels) if metric.labels else family
            self._children[key] = child
        return child

    def _unset(self) -> frozenset[str]:
        """Return the names of gauges without a value; the library would show them as 0."""
        known = {name for name, _ in tuple(self._set)}
        return frozenset(
            metric.name
            for metric in self._metrics
            if metric.kind is MetricKind.GAUGE and metric.name not in known
        )


class _Shown(Collector):
    """A view of a registry that hides gauges without a value and the `_created` samples."""

    def __init__(self, registry: CollectorRegistry, hidden: Callable[[], frozenset[str]]) -> None:
        self._registry = registry
        self._hidden = hidden

    def collect(self) -> Iterator[Family]:
        """Yield the metric families with their samples."""
        hidden = self._hidden()
        for family in self._registry.collect():
            if family.name in hidden:
                continue
            family.samples = [
                sample for sample in family.samples if not sample.name.endswith("_created")
            ]
            yield family


def _made(metric: Metric, registry: CollectorRegistry) -> _Family:
    names = [label.name for label in metric.labels]
    if metric.kind is MetricKind.GAUGE:
        return Gauge(metric.name, metric.help, names, registry=registry)
    family: _Family
    if metric.kind is MetricKind.COUNTER:
        family = Counter(metric.name, metric.help, names, registry=registry)
    else:
        family = Histogram(metric.name, metric.help, names, registry=registry, buckets=SECONDS)
    if names:
        for values in _combinations(metric):
            family.labels(*values)
    return family


def _combinations(metric: Metric) -> Iterable[tuple[str, ...]]:
    return product(*(label.values for label in metric.labels))


# Metrics of every process -------------------------------------------------------------------------


def show_disk(instruments: Instruments, folder: Path) -> None:
    """Set the metrics of the free space and the size of the disk that contains a folder."""
    with suppress(OSError):
        usage = shutil.disk_usage(folder)
        instruments.set(DISK_FREE, usage.free)
        instruments.set(DISK_SIZE, usage.total)


def show_certificate(instruments: Instruments, tls: TlsFiles) -> None:
    """Set the metric of the time when the certificate expires. Raises the errors of
    `TlsFiles.load`."""
    instruments.set(CERTIFICATE_EXPIRY, tls.load().expires.timestamp())
