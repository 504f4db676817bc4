"""Makes the page docs/reference/metrics.md from the definitions of the metrics.

.venv/bin/python tools/metrics_page.py > docs/reference/metrics.md
"""

from __future__ import annotations

import sys

from potluck.common.monitoring.definitions import METRICS, Metric
from potluck.common.monitoring.metric_labels import LATEST_RUNS, Label, MeasuredParty

_HEAD = f"""\
# Metrics

This page lists the metrics of coordinator, hosts and relays, for people who write dashboards and
alerts. A process needs a `metrics_address` (or `--metrics-address`) to serve them, at `/metrics`,
together with

- `/healthz`: 200 as long as the process answers;
- `/readyz`: 200 once it works: the coordinator serves and has its database, a host is connected.
  Otherwise 503 and the reason.

A port alone means 127.0.0.1, over plain HTTP, for all users of the machine. For another interface
set `[metrics_tls]`: then only the scrapers that it names get an answer, over mutual TLS
([how](../operate/monitoring.md#metrics-across-machines)).

The number of series does not depend on the number of clients or hosts; `potluck clients` and
`potluck watch` show single clients. Series with a `run` are kept for the {LATEST_RUNS} runs that
started last. Metrics contain no weights, numbers of samples, triplets or keys. Counters and
histograms begin at 0 when a process starts; a gauge appears once it has a value.

Every process also has `process_cpu_seconds_total`, `process_resident_memory_bytes`,
`process_virtual_memory_bytes`, `process_start_time_seconds`, `process_open_fds` and
`process_max_fds` (on Linux).
"""

_SECTIONS = (
    ("Coordinator, hosts and relays", frozenset(MeasuredParty)),
    ("Coordinator", frozenset({MeasuredParty.COORDINATOR})),
    ("Hosts", frozenset({MeasuredParty.HOST})),
    ("Relays", frozenset({MeasuredParty.RELAY})),
)


def metrics_page() -> str:
    """Return the page as Markdown."""
    parts = [_HEAD]
    for title, parties in _SECTIONS:
        metrics = [metric for metric in METRICS if metric.parties == parties]
        parts.append(f"\n## {title}\n\n| metric | kind | unit | what |\n|---|---|---|---|\n")
        parts += [_row(metric) for metric in metrics]
    return "".join(parts)


def _row(metric: Metric) -> str:
    what = [metric.help.replace("|", "\\|")]
    what += [f"`{label.name}`: {_values(label)}." for label in metric.labels]
    if metric.condition:
        what.append(f"There {metric.condition}.")
    return f"| `{metric.name}` | {metric.kind} | {metric.unit or '–'} | {' '.join(what)} |\n"


def _values(label: Label) -> str:
    return ", ".join(f"`{value}`" for value in label.values) or label.about


if __name__ == "__main__":
    sys.stdout.write(metrics_page())
