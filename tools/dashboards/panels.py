"""Query helpers and panels that several dashboards share."""

from __future__ import annotations

from dashboards.grafana_json import Panel, Query

OF_RUN = '{run=~"$run"}'
"""Label matcher for the series of the runs chosen at the top."""

BY_RUN = "{{run}}"
"""Legend with the name of the run."""


def rate(metric: str, *by: str, labels: str = "") -> str:
    """Return the rate of a counter, summed by labels; `labels` selects series."""
    return f"sum by ({', '.join(by)}) (rate({metric}{labels}[$__rate_interval]))"


def increase(metric: str, *by: str, labels: str = "") -> str:
    """Return the increase of a counter, summed by labels; `labels` selects series."""
    return f"sum by ({', '.join(by)}) (increase({metric}{labels}[$__rate_interval]))"


def quantiles(metric: str, *by: str) -> tuple[Query, ...]:
    """Return queries of a histogram's median and 95 % quantile, by labels."""
    grouped = ", ".join(("le", *by))
    legend = " ".join(f"{{{{{label}}}}}" for label in by)
    return tuple(
        Query(
            f"histogram_quantile({share}, "
            f"sum by ({grouped}) (rate({metric}_bucket[$__rate_interval])))",
            f"{legend} {name}".strip(),
        )
        for share, name in ((0.5, "median"), (0.95, "95 %"))
    )


PROCESS = (
    Panel(
        title="Memory",
        queries=[Query("process_resident_memory_bytes", "{{instance}}")],
        about="Resident memory, mapped model and update files included.",
        unit="bytes",
    ),
    Panel(
        title="Processor",
        queries=[Query("rate(process_cpu_seconds_total[$__rate_interval])", "{{instance}}")],
        about="Cores in use by each process.",
    ),
)

DISK = Panel(
    title="Disk left",
    queries=[Query("potluck:disk_free:ratio", "{{instance}}")],
    about="Share of the state directory's disk that is free; an alert comes below 10 %.",
    kind="bargauge",
    unit="percentunit",
    least=0,
    most=1,
)
