"""Makes the page docs/reference/metrics.md from the definitions of the metrics.

.venv/bin/python tools/metrics_page.py > docs/reference/metrics.md
"""

from __future__ import annotations

import sys

from potluck.common.monitoring.definitions import METRICS, Metric
from potluck.common.monitoring.metric_labels import LATEST_RUNS, Label, MeasuredParty

_HEAD = f"""\
# Metrics

Made from `common/potluck/common/monitoring/definitions.py` by `make pages`; edit that.

The coordinator and every host serve them at `/metrics` of their metrics address (`metrics_address`
in their configuration, or `--metrics-address`; off unless set), beside

- `/healthz`: 200 as long as the process answers at all;
- `/readyz`: 200 once it does its work: the coordinator serves and has its database, a host attends
  its coordinator; else 503, and why.

A port alone means 127.0.0.1, and HTTP there is plain, for whoever is on the machine. For another
interface set `[metrics_tls]`: then only the scrapers it names are answered, over mutual TLS
([how](../operate/monitoring.md#metrics-across-machines)).

How many series there are does not depend on how many clients or hosts take part: what concerns one
client is shown by `potluck clients` and `potluck watch`. Series with a `run` are kept for the
{LATEST_RUNS} runs begun last. No metric holds a model's weights, a number of samples, a triplet or
a key. Counters and histograms begin at 0 when a process starts; a gauge is there once it has a
value.

Besides, every process has `process_cpu_seconds_total`, `process_resident_memory_bytes`,
`process_virtual_memory_bytes`, `process_start_time_seconds`, `process_open_fds` and
`process_max_fds` (on Linux), which count what they say.
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
