"""Data that leave a host in addition to its part of a masked round's sum."""

from __future__ import annotations

from functools import partial

from adversary.conftest import CLIENTS, Scene
from prometheus_client.parser import text_string_to_metric_families
from support.federation import until

from potluck.client.disclosure.outgoing_log import OutgoingLog
from potluck.server.store import RunState

ROUND = f"""
rounds = 1
clients_per_round = {CLIENTS}
expected_clients = {CLIENTS}
task = {{name = "digits", clients = {CLIENTS}}}
training = {{epochs = 40}}
"""
TELLING = ("training_seconds", "training_loss", "training_samples")


def told_by_metrics(scene: Scene) -> set[str]:
    """Return the metrics about trainings for which hosts report numbers."""
    return {
        sample.name
        for instruments in scene.federation.members.instruments.values()
        for family in text_string_to_metric_families(instruments.exposition().decode())
        for sample in family.samples
        if sample.value and any(name in sample.name for name in TELLING)
    }


def told_progress(scene: Scene) -> set[float]:
    """Return the shares of their trainings that hosts reported as done."""
    return {
        progress.fraction
        for _, message in scene.liar.said
        for progress in message.heartbeat.progress
    } - {0.0}


async def test_masked_round_reveals_no_loss_speed_or_progress_of_a_client(scene: Scene) -> None:
    row = await scene.federation.finished("secure_aggregation = true\n" + ROUND)
    assert row.state is RunState.FINISHED, row.reason
    assert not told_by_metrics(scene)
    assert not told_progress(scene)


async def test_open_round_shows_loss_speed_and_progress_of_clients(scene: Scene) -> None:
    """Without masks, the values that the test of masked rounds searches for are disclosed."""
    row = await scene.federation.finished(ROUND)
    assert row.state is RunState.FINISHED, row.reason
    assert told_by_metrics(scene)


async def test_values_sent_with_an_open_update_are_in_the_log_of_the_client(scene: Scene) -> None:
    row = await scene.federation.finished(ROUND)
    [committed] = await scene.federation.coordinator.store.call(
        lambda store: store.rounds(row.run_id)
    )
    for member in committed.members:
        assert member.update is not None
        folder = scene.federation.folder / member.client_id.replace("client", "host") / "outgoing"
        [sent] = OutgoingLog(folder).entries(member.client_id)
        report = member.update
        assert (sent["kind"], sent["weighting"]) == ("update", "exact")
        assert (sent["blake3"], sent["bytes"]) == (report.blake3, report.size)
        told = {name: sent["report"][name] for name in ("samples", "steps", "loss")}
        assert told == {name: getattr(report, name) for name in told}
        assert 0 < sent["report"]["seconds"] <= report.seconds


async def test_masked_rounds_are_recorded_only_in_the_sum_ledger(scene: Scene) -> None:
    row = await scene.federation.finished("secure_aggregation = true\n" + ROUND)
    assert row.state is RunState.FINISHED, row.reason
    for client in scene.federation.members.names:
        folder = scene.federation.folder / client.replace("client", "host") / "outgoing"
        assert not list(OutgoingLog(folder).entries(client))
        # Each client records its release later.
        await until(partial(scene.federation.has_released, client))
