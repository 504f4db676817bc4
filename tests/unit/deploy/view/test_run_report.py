"""The report of a run: planned and realised cohorts."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from support.operator_service import covering, spread_out

from potluck.common.errors import RunError
from potluck.common.records.round import Round
from potluck.common.records.round_message import round_message, round_of
from potluck.deploy.commands.report_command import coverage_lines, spread_lines, summary_lines
from potluck.deploy.operator.run_view import shown_measures
from potluck.deploy.view.run_report import report_values, run_report
from potluck.deploy.view.selection_plots import plot_selection
from potluck.rpc.v1 import operator_pb2 as rpc

INCLUDED, LOST = rpc.MEMBER_STATE_INCLUDED, rpc.MEMBER_STATE_LOST
CLIENTS = [
    rpc.ClientProfile(client_id="c10", label_counts=[4, 4], triplet=[0, 0.1, 0.9]),
    rpc.ClientProfile(client_id="c2", label_counts=[8, 0], triplet=[1, 0, 0]),
    rpc.ClientProfile(client_id="c1", label_counts=[0, 8]),
]


def committed(number: int, accuracy: float, **states: rpc.MemberState.ValueType) -> Round:
    return round_of(
        rpc.CommittedRound(
            round=number,
            members=[rpc.Member(client_id=client, state=state) for client, state in states.items()],
            metrics=rpc.Metrics(accuracy=accuracy),
        )
    )


ROUNDS = [committed(1, 0.5, c2=INCLUDED, c1=LOST), committed(2, 0.75, c1=INCLUDED, c2=INCLUDED)]


def test_lost_client_lowers_the_realised_label_entropy_of_the_report() -> None:
    report = run_report(ROUNDS, 2, CLIENTS)
    assert list(report.population.ids) == ["c1", "c2", "c10"]
    assert report.planned[1].tolist() == [1, 0]
    assert report.realised[1].tolist() == [1]
    assert report.accuracies == {"mean": {1: 0.5, 2: 0.75}}
    first, second = report_values(report)
    assert first["planned"]["entropy"] == pytest.approx(1)
    assert first["realised"]["entropy"] == pytest.approx(0)
    assert first["planned"]["to_balanced"] == pytest.approx(0)
    assert first["realised"]["to_balanced"] == pytest.approx(1 - math.sqrt(0.5))
    assert first["planned"]["types"]["no triplet"] == 1
    assert first["realised"]["types"]["no triplet"] == 0
    assert second["planned"] == second["realised"]
    lines = summary_lines([first, second])
    assert "  clients a round: 2 selected, 1.5 included" in lines
    assert "  entropy of their labels, in bits: 1 selected, 0.5 included" in lines


def test_run_report_omits_undisclosed_values() -> None:
    silent = [rpc.ClientProfile(client_id=each.client_id) for each in CLIENTS]
    values = report_values(run_report(ROUNDS, 2, silent))
    assert values[0] == {"round": 1, "planned": {"clients": 2}, "realised": {"clients": 1}}
    assert len(summary_lines(values)) == 1


def test_run_report_without_a_committed_round_is_refused() -> None:
    with pytest.raises(RunError, match="no committed round"):
        run_report([], 2, CLIENTS)


@pytest.mark.parametrize("known", [True, False])
def test_run_report_plot_shows_lost_clients(tmp_path: Path, known: bool) -> None:
    clients = CLIENTS if known else [rpc.ClientProfile(client_id=c.client_id) for c in CLIENTS]
    pictures = []
    for rounds in (ROUNDS, [committed(1, 0.5, c2=INCLUDED, c1=INCLUDED), ROUNDS[1]]):
        report = run_report(rounds, 2, clients)
        path = tmp_path / "report.png"
        plot_selection(
            report.population,
            report.planned,
            path,
            title="run",
            included=report.realised,
            accuracies=report.accuracies,
        )
        pictures.append(imread(path)[..., :3])
    with_loss, without = pictures
    assert (with_loss.min(axis=2) < 0.9).mean() > 0.01
    assert with_loss.shape != without.shape or not np.array_equal(with_loss, without)


def test_run_report_contains_the_coverage_of_metrics() -> None:
    second = covering(
        rpc.WatchRunResponse(committed=round_message(ROUNDS[1])), 3, 6, 120, partial=True
    )
    report = run_report([ROUNDS[0], round_of(second.committed)], 2, CLIENTS)
    before, after = report_values(report)
    assert "coverage" not in before
    assert after["coverage"]["loss"]["clients"] == 3
    assert coverage_lines(report, shown_measures(None)) == [
        "  loss, accuracy, worst group of round 2: over 3 of 6 clients, 120 samples, partial",
        "  rounds with partial metrics: 2",
    ]


def test_run_report_contains_the_spread_over_clients(tmp_path: Path) -> None:
    second = spread_out(rpc.WatchRunResponse(committed=round_message(ROUNDS[1]))).committed
    report = run_report([ROUNDS[0], round_of(second)], 2, CLIENTS)
    assert report.accuracies["worst tenth"] == {2: pytest.approx(0.1)}
    before, after = report_values(report)
    assert "spreads" not in before
    assert after["spreads"]["accuracy"]["clients"] == 12
    title, line = spread_lines(report, shown_measures(None))
    assert "round 2" in title
    assert line == (
        "  accuracy of 12 clients: median 50.0 %, eight tenths from 20.0 % to 90.0 %, "
        "mean of the worst tenth 10.0 %"
    )
    plot_selection(
        report.population, report.planned, tmp_path / "r.png",
        title="t", included=report.realised, accuracies=report.accuracies,
    )  # fmt: skip
    assert imread(tmp_path / "r.png").size
