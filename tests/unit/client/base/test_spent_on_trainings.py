"""A host's metrics on trainings with noise: highest loss, and clients near the limit."""

from __future__ import annotations

from potluck.client.base.host_metrics import HostMetrics


def shown(metrics: HostMetrics) -> dict[str, float]:
    lines = metrics.instruments.exposition().decode().splitlines()
    found = (line.split() for line in lines if line.startswith("potluck_host_privacy"))
    return {name: float(value) for name, value in found}


def test_metrics_show_the_highest_privacy_loss_and_the_clients_near_the_limit() -> None:
    metrics = HostMetrics()
    assert "potluck_host_privacy_near_limit_clients" not in shown(metrics)
    metrics.spent_on_trainings("a", 6.4567, limit=8.0)
    metrics.spent_on_trainings("b", 2.0, limit=8.0)
    found = shown(metrics)
    assert found["potluck_host_privacy_trainings_spent_epsilon"] == 6.5
    assert found["potluck_host_privacy_trainings_left_epsilon"] == 1.5
    assert found["potluck_host_privacy_near_limit_clients"] == 1
