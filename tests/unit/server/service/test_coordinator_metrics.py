"""The coordinator's metrics that name a host or a caller: few series, however many there are."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from potluck.common.monitoring.instruments import Instruments
from potluck.common.monitoring.metric_labels import MOST_AWAY, MeasuredParty
from potluck.common.net.identity import Credential, Identity, Role
from potluck.server.hosts.attendance import Attendance
from potluck.server.machine.events import RunEnding
from potluck.server.service.coordinator_metrics import CoordinatorMetrics

NOW = datetime.now(UTC)


@pytest.fixture
def metrics(tmp_path: Path) -> CoordinatorMetrics:
    instruments = Instruments(MeasuredParty.COORDINATOR)
    return CoordinatorMetrics(instruments, Attendance(lambda: 0.0), tmp_path)


def shown(metrics: CoordinatorMetrics, name: str) -> dict[tuple[str, ...], float]:
    """Return a metric's samples, by the values of its labels in the order of label names."""
    families = text_string_to_metric_families(metrics.instruments.exposition().decode())
    return {
        tuple(value for _, value in sorted(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
        if sample.name == name
    }


def credential(role: Role, name: str, days: float) -> Credential:
    identity = Identity(federation="demo", role=role, name=name)
    return Credential(identity=identity, serial=1, expires=NOW + timedelta(days=days))


def test_refusal_metric_names_the_newest_caller_for_each_reason(
    metrics: CoordinatorMetrics,
) -> None:
    for peer in ("host host-1", "host host-2", "host host-2"):
        metrics.refused("IDENTITY_REFUSED", peer)
    metrics.refused("a host's own word", "operator ada")
    assert shown(metrics, "potluck_refused_peer_info") == {
        ("host host-2", "IDENTITY_REFUSED"): 1,
        ("operator ada", "OTHER"): 1,
    }


def test_metric_shows_the_next_certificate_of_each_role_to_expire(
    metrics: CoordinatorMetrics,
) -> None:
    name = "potluck_peer_certificate_expiry_timestamp_seconds"
    for role, peer, days in (
        *((Role.OPERATOR, "ada", 9), (Role.OPERATOR, "bob", 3), (Role.OPERATOR, "gone", -2)),
        (Role.HOST, "host-0", 30),
    ):
        metrics.seen(credential(role, peer, days))
    assert set(shown(metrics, name)) == {("operator bob", "operator"), ("host host-0", "host")}
    metrics.seen(credential(Role.OPERATOR, "bob", 300))
    found = shown(metrics, name)
    assert set(found) == {("operator ada", "operator"), ("host host-0", "host")}
    assert found["operator ada", "operator"] == (NOW + timedelta(days=9)).timestamp()


def test_metric_names_a_limited_number_of_disconnected_hosts_of_a_run(
    metrics: CoordinatorMetrics,
) -> None:
    away = {"a": [f"host-{number:02}" for number in range(50)], "not shown": ["host-0"]}
    metrics.watch_runs(lambda: away)
    metrics.observer("a")
    name = "potluck_run_away_host_info"
    assert set(shown(metrics, name)) == {(f"host-{n:02}", "a") for n in range(MOST_AWAY)}
    away["a"] = ["host-07"]
    assert set(shown(metrics, name)) == {("host-07", "a")}
    away["a"] = []
    assert shown(metrics, name) == {}


def test_metric_shows_the_failure_time_of_a_run_until_it_is_resumed(
    metrics: CoordinatorMetrics,
) -> None:
    name = "potluck_run_failed_timestamp_seconds"
    metrics.failed_at_start("a", NOW)
    assert shown(metrics, name) == {("a",): NOW.timestamp()}
    metrics.observer("a").ended(RunEnding.STOPPED, NOW)
    assert shown(metrics, name) == {}


def test_metric_shows_the_next_member_record_to_expire(metrics: CoordinatorMetrics) -> None:
    name = "potluck_member_records_expiry_timestamp_seconds"
    assert shown(metrics, name) == {}
    metrics.watch_members(lambda: NOW)
    assert shown(metrics, name) == {(): NOW.timestamp()}
