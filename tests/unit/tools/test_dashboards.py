"""The dashboard files: up to date, valid for Grafana, and about existing metrics."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard
from support.repository import ROOT

from dashboards import dashboard_files
from potluck.common.monitoring.definitions import METRICS, MetricKind

ASSETS = ROOT / "deploy" / "assets"
DASHBOARDS = sorted((ASSETS / "grafana" / "dashboards").glob("*.json"))
RULES = sorted((ASSETS / "prometheus").glob("*.rules.yml"))
UNITS = {"short", "s", "bytes", "Bps", "percentunit"}
KINDS = {"row", "timeseries", "stat", "gauge", "bargauge", "table"}


def series() -> set[str]:
    names = {"up", "ALERTS", "process_cpu_seconds_total", "process_resident_memory_bytes"}
    names.add("process_start_time_seconds")
    for metric in METRICS:
        histogram = metric.kind is MetricKind.HISTOGRAM
        suffixes = ("_bucket", "_sum", "_count") if histogram else ("",)
        names |= {metric.name + suffix for suffix in suffixes}
    rules = [rule for path in RULES for group in read(path)["groups"] for rule in group["rules"]]
    return names | {rule["record"] for rule in rules if "record" in rule}


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def panels(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["panels"]
    return found


def expressions(path: Path) -> list[str]:
    if path.suffix == ".json":
        return [target["expr"] for panel in panels(path) for target in panel.get("targets", ())]
    return [rule["expr"] for group in read(path)["groups"] for rule in group["rules"]]


def test_dashboard_files_equal_the_generated_ones() -> None:
    assert {path.name: path.read_text() for path in DASHBOARDS} == dashboard_files(), (
        "run: make pages"
    )


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboards_are_unchanged_by_the_grafana_model(path: Path) -> None:
    """Nothing is lost when a dashboard is read into Grafana's own model and written again."""
    written = json.loads(path.read_text())
    understood = json.loads(JSONEncoder().encode(Dashboard.from_json(written)))
    assert missing(written, understood) == []


def missing(written: Any, understood: Any, where: str = "") -> list[str]:
    """Return the places where `understood` lacks or changes a written value.

    It may add nulls and defaults.
    """
    if isinstance(written, dict):
        if not isinstance(understood, dict):
            return [where]
        lost = [
            f"{where}.{key}"
            for key in written
            if key not in understood and written[key] not in (None, "", [], {})
        ]
        both = written.keys() & understood.keys()
        return lost + list(
            itertools.chain.from_iterable(
                missing(written[key], understood[key], f"{where}.{key}") for key in sorted(both)
            )
        )
    if isinstance(written, list):
        if len(written) != len(understood):
            return [where]
        return list(
            itertools.chain.from_iterable(
                missing(one, other, f"{where}[{index}]")
                for index, (one, other) in enumerate(zip(written, understood, strict=True))
            )
        )
    return [] if written == understood else [where]


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboard_panels_have_descriptions_and_do_not_overlap(path: Path) -> None:
    covered: set[tuple[int, int]] = set()
    found = panels(path)
    assert len({panel["id"] for panel in found}) == len(found)
    for panel in found:
        assert panel["type"] in KINDS
        assert panel["title"]
        grid = panel["gridPos"]
        cells = set(
            itertools.product(
                range(grid["x"], grid["x"] + grid["w"]), range(grid["y"], grid["y"] + grid["h"])
            )
        )
        assert not cells & covered, panel["title"]
        assert all(x < 24 for x, _ in cells)
        covered |= cells
        if panel["type"] != "row":
            assert panel["description"].endswith(".")
            assert panel["targets"]
            assert panel["fieldConfig"]["defaults"]["unit"] in UNITS


@pytest.mark.parametrize("path", [*DASHBOARDS, *RULES], ids=lambda path: path.name)
def test_dashboards_query_only_existing_series(path: Path) -> None:
    known = series()
    for expression in expressions(path):
        named = set(re.findall(r"\b(?:potluck|process)[a-zA-Z0-9_:]*", without_labels(expression)))
        assert named <= known, expression


def without_labels(expression: str) -> str:
    return re.sub(r"\{[^}]*\}", "", expression)


def test_every_metric_is_on_a_dashboard_or_in_a_rule() -> None:
    shown = [expression for path in DASHBOARDS for expression in expressions(path)]
    text = " ".join([*shown, *(path.read_text() for path in RULES)])
    unseen = [metric.name for metric in METRICS if metric.name not in text]
    assert unseen == []


def test_provisioning_names_the_data_source_and_the_folder_of_the_dashboards() -> None:
    folder = ASSETS / "grafana" / "provisioning"
    [source] = read(folder / "datasources" / "prometheus.yml")["datasources"]
    assert (source["uid"], source["type"]) == ("prometheus", "prometheus")
    [provider] = read(folder / "dashboards" / "potluck.yml")["providers"]
    assert provider["type"] == "file"
    compose = read(ASSETS.parents[1] / "docker-compose.yml")
    mounts = [volume.split(":") for volume in compose["services"]["grafana"]["volumes"]]
    targets = {target: source for source, target, *_ in mounts}
    assert targets[provider["options"]["path"]] == "./deploy/assets/grafana/dashboards"
    assert targets["/etc/grafana/provisioning"] == "./deploy/assets/grafana/provisioning"
    for path in DASHBOARDS:
        sources = {
            target["datasource"]["uid"]
            for panel in panels(path)
            for target in panel.get("targets", ())
        }
        assert sources == {source["uid"]}


def shipped_alerts() -> list[dict[str, Any]]:
    rules = [rule for path in RULES for group in read(path)["groups"] for rule in group["rules"]]
    return [rule for rule in rules if "alert" in rule]


def test_every_alert_fires_and_resolves_in_the_promtool_tests() -> None:
    tests = read(ROOT / "tests" / "testdata" / "alerts.test.yml")["tests"]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    shipped = {alert["alert"] for alert in shipped_alerts()}
    assert {case["alertname"] for case in cases if case["exp_alerts"]} == shipped
    assert {case["alertname"] for case in cases if not case["exp_alerts"]} == shipped


def test_every_alert_has_a_runbook() -> None:
    page = (ASSETS.parents[1] / "docs/operate/alerts.md").read_text()
    _, *entries = re.split(r"^### ", page, flags=re.MULTILINE)
    fields = {
        entry.partition("\n")[0]: re.findall(r"^- \*\*(\w+)\*\*: \S", entry, re.MULTILINE)
        for entry in entries
    }
    alerts = shipped_alerts()
    assert set(fields) == {alert["alert"] for alert in alerts}
    assert {tuple(names) for names in fields.values()} == {("Means", "Check", "Fix")}
    for alert in alerts:
        assert alert["labels"]["severity"] in ("warning", "critical")
        runbook = f"docs/operate/alerts.md#{alert['alert'].lower()}"
        assert alert["annotations"]["runbook"] == runbook
