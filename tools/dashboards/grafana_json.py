"""Makes Grafana's dashboards from short definitions: panels in a grid, queries, units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

COLUMNS = 24
SCHEMA_VERSION = 41
DATA_SOURCE = {"type": "prometheus", "uid": "prometheus"}


@dataclass(frozen=True)
class Query:
    """A PromQL expression, and the name of its series: text, or {{label}}."""

    expression: str
    legend: str = ""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A dashboard's panel. kind: timeseries, stat, gauge, bargauge or table. unit: a unit's id."""

    title: str
    queries: Sequence[Query]
    about: str
    kind: str = "timeseries"
    unit: str = "short"
    width: int = 8
    height: int = 8
    stacked: bool = False
    least: float | None = None
    most: float | None = None
    steps: Sequence[tuple[float, str]] = ()
    """Thresholds, each with the colour of values from it on; values below the first are green."""


@dataclass(frozen=True, kw_only=True)
class Dashboard:
    """Rows of panels under headings. by_run: True if a run can be chosen at the top."""

    uid: str
    title: str
    about: str
    rows: Sequence[tuple[str, Sequence[Panel]]] = field(default_factory=tuple)
    by_run: bool = True


def dashboard_json(dashboard: Dashboard) -> dict[str, Any]:
    """Return the dashboard in Grafana's JSON form."""
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.about,
        "tags": ["potluck"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "links": [_links()],
        "annotations": {"list": []},
        "templating": {"list": [_run_variable()] if dashboard.by_run else []},
        "panels": _panels(dashboard),
    }


def _panels(dashboard: Dashboard) -> list[dict[str, Any]]:
    panels: list[dict[str, Any]] = []
    top = 0
    for heading, row in dashboard.rows:
        grid = {"x": 0, "y": top, "w": COLUMNS, "h": 1}
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": heading,
                "gridPos": grid,
                "collapsed": False,
                "panels": [],
            }
        )
        top, left, tallest = top + 1, 0, 0
        for panel in row:
            if left + panel.width > COLUMNS:
                top, left, tallest = top + tallest, 0, 0
            grid = {"x": left, "y": top, "w": panel.width, "h": panel.height}
            panels.append(_panel(panel, len(panels) + 1, grid))
            left, tallest = left + panel.width, max(tallest, panel.height)
        top += tallest
    return panels


def _panel(panel: Panel, number: int, grid: dict[str, int]) -> dict[str, Any]:
    table = panel.kind == "table"
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "gridPos": grid,
        "datasource": DATA_SOURCE,
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": DATA_SOURCE,
                "expr": query.expression,
                "legendFormat": query.legend or "__auto",
                **({"format": "table", "instant": True} if table else {}),
            }
            for index, query in enumerate(panel.queries)
        ],
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "options": _OPTIONS[panel.kind],
    }


def _defaults(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit}
    if panel.least is not None:
        defaults["min"] = panel.least
    if panel.most is not None:
        defaults["max"] = panel.most
    if panel.steps:
        steps: list[dict[str, Any]] = [{"value": None, "color": "green"}]
        steps += [{"value": value, "color": colour} for value, colour in panel.steps]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "fillOpacity": 40 if panel.stacked else 8,
            "lineWidth": 1,
            "showPoints": "auto",
            "spanNulls": False,
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        }
    return defaults


_REDUCED = {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}}
_OPTIONS: dict[str, dict[str, Any]] = {
    "timeseries": {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {**_REDUCED, "colorMode": "value", "graphMode": "area", "textMode": "auto"},
    "gauge": {**_REDUCED, "showThresholdLabels": False, "showThresholdMarkers": True},
    "bargauge": {**_REDUCED, "orientation": "horizontal", "displayMode": "basic"},
    "table": {"showHeader": True},
}


def _run_variable() -> dict[str, Any]:
    query = "label_values(potluck_run_info, run)"
    return {
        "name": "run",
        "label": "Run",
        "type": "query",
        "datasource": DATA_SOURCE,
        "query": {"query": query, "refId": "run"},
        "refresh": 2,
        "sort": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _links() -> dict[str, Any]:
    return {
        "type": "dashboards",
        "title": "Potluck",
        "tags": ["potluck"],
        "asDropdown": False,
        "includeVars": True,
        "keepTime": True,
        "targetBlank": False,
        "icon": "external link",
        "tooltip": "",
        "url": "",
    }
