"""Results of a demo: its files, its summary, its picture."""

from __future__ import annotations

import inspect
import io
import json
import re
import socket
import tomllib
from datetime import datetime
from functools import reduce
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from rich.console import Console
from support.operator_service import committed, covering, member, spread_out, status
from support.repository import ROOT

from potluck.client.config import load_config
from potluck.common.errors import ConfigurationError, PluginError, RunError
from potluck.common.run_file.runfile import parse_run_file
from potluck.deploy.commands.demo_command import (
    COMPARED,
    demo,
    print_comparison,
    print_summary,
)
from potluck.deploy.local.demo_files import (
    DemoOptions,
    client_ranges,
    demo_run_file,
    new_folder,
    reserved_port,
    write_demo_files,
)
from potluck.deploy.operator.operator_config import OperatorFlags, load_operator_config
from potluck.deploy.operator.run_view import RunView, observe
from potluck.deploy.view.readable import readable_bytes
from potluck.deploy.view.run_comparison import compare
from potluck.deploy.view.run_plot import (
    clients_of,
    comparison_figure,
    plot_comparison,
    plot_run,
    run_figure,
    selection_matrix,
)
from potluck.deploy.view.run_summary import CoverageSummary, RunSummary, summarise
from potluck.rpc.v1 import operator_pb2
from potluck.rpc.v1.operator_pb2 import RunState

SUMMARY_KEYS = (
    "run, task, selector, strategy, rounds, clients, count, accuracy, worst_group_accuracy, loss, "
    "seconds, bytes_down, bytes_up, coverage, measures, history"
)
ROUND_KEYS = (
    "round, cohort, accuracy, worst_group_accuracy, loss, others, spreads, coverage, late, "
    "seconds, bytes_down, bytes_up"
)


def options(**changes: object) -> DemoOptions:
    values = {
        "task": "colored-digits",
        "selector": "uniform",
        "strategy": "fedavg",
        "clients": 24,
        "hosts": 4,
        "count": 9,
        "rounds": 30,
        "seed": 7,
        "device": "cpu",
    }
    return DemoOptions(**(values | changes))  # type: ignore[arg-type]  # checked at run time


def summary_of_two_rounds() -> RunSummary:
    second = covering(committed(2, 0.75, member(10), member(2)), 3, 6, 120, partial=True)
    events = [status(), second, committed(1, 0.5), status(RunState.RUN_STATE_FINISHED)]
    return summarise(reduce(observe, events, RunView()), clients=24)


def test_demo_summary_has_exactly_the_documented_keys() -> None:
    values = json.loads(summary_of_two_rounds().model_dump_json())
    assert ", ".join(values) == SUMMARY_KEYS
    assert [", ".join(entry) for entry in values["history"]] == [ROUND_KEYS] * 2
    assert values["history"][1]["cohort"] == ["client-10", "client-2"]
    assert (values["accuracy"], values["worst_group_accuracy"]) == (0.75, 0.375)
    assert (values["rounds"], values["clients"], values["count"]) == (2, 24, 3)
    assert (values["seconds"], values["bytes_down"]) == (3.0, 2_400_000)


def test_demo_summary_uses_the_last_evaluated_round() -> None:
    unevaluated = committed(2, 0.0)
    unevaluated.committed.ClearField("metrics")
    view = reduce(observe, [status(), committed(1, 0.5), unevaluated], RunView())
    summary = summarise(view, clients=3)
    assert (summary.rounds, summary.accuracy) == (2, 0.5)
    assert summary.history[1].loss is None


def test_loss_that_is_not_finite_is_null_in_the_summary() -> None:
    event = committed(1, 0.5)
    event.committed.metrics.loss = float("nan")
    view = reduce(observe, [status(), event], RunView())
    assert json.loads(summarise(view, clients=3).model_dump_json())["loss"] is None


def test_demo_summary_contains_the_coverage_of_its_metrics() -> None:
    summary = summary_of_two_rounds()
    behind = CoverageSummary(clients=3, asked=6, samples=120, partial=True)
    assert summary.coverage["accuracy"] == behind
    assert [each.coverage.get("loss") for each in summary.history] == [None, behind]
    [last] = [
        label
        for axes in run_figure(summary).axes
        for label in axes.get_legend_handles_labels()[1]
        if label.startswith("accuracy")
    ]
    assert last == "accuracy 75.0 % (3 of 6 clients, 120 samples, partial)"


def test_summary_has_the_coverage_of_a_round_with_other_metrics_only() -> None:
    event = covering(committed(1, 0.5), 3, 6, 120, partial=True)
    event.committed.metrics.CopyFrom(operator_pb2.Metrics(others={"rmse": 2.5}))
    trained = committed(2, 0.5)
    trained.committed.metrics.CopyFrom(operator_pb2.Metrics(others={"training_loss": 0.5}))
    summary = summarise(reduce(observe, [status(), event, trained], RunView()), clients=6)
    assert summary.history[0].others == {"rmse": 2.5}
    assert summary.coverage == summary.history[0].coverage != {}


def test_summary_of_a_run_without_events_is_refused() -> None:
    with pytest.raises(RunError, match="the coordinator sent no event of the run"):
        summarise(RunView(), clients=3)


def test_demo_plot_has_a_line_per_metric(tmp_path: Path) -> None:
    path = tmp_path / "run.png"
    plot_run(summary_of_two_rounds(), path)
    pixels = matplotlib.image.imread(path)[..., :3]
    assert min(pixels.shape[:2]) > 400
    for colour in ((0x1B, 0x7F, 0x5C), (0xC2, 0x41, 0x7C), (0x35, 0x66, 0xA8), (0xE0, 0x91, 0x2F)):
        near = np.abs(pixels - np.array(colour) / 255).max(axis=-1) < 0.02
        assert near.sum() > 50


def test_demo_plot_shows_the_spread_over_clients(tmp_path: Path) -> None:
    seen = [status(), spread_out(committed(1, 0.5)), spread_out(committed(2, 0.75))]
    summary = summarise(reduce(observe, seen, RunView()), clients=12)
    assert summary.history[0].spreads["accuracy"].worst_tenth == pytest.approx(0.1)
    plot_run(summary, tmp_path / "spread.png")
    without = [status(), committed(1, 0.5), committed(2, 0.75)]
    plot_run(summarise(reduce(observe, without, RunView()), clients=12), tmp_path / "plain.png")
    spread, plain = (
        matplotlib.image.imread(tmp_path / name)[..., :3] for name in ("spread.png", "plain.png")
    )
    band = np.array([0xDB, 0xEC, 0xE6]) / 255  # the pale green of the band
    counts = [(np.abs(each - band).max(axis=-1) < 0.02).sum() for each in (spread, plain)]
    assert counts[0] > 20 * (counts[1] + 1)


def test_demo_plot_is_drawn_without_metrics(tmp_path: Path) -> None:
    event = committed(1, 0.5)
    event.committed.ClearField("metrics")
    summary = summarise(reduce(observe, [status(), event], RunView()), clients=3)
    plot_run(summary, tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_plot_of_a_run_without_evaluations_shows_the_training_loss() -> None:
    events = [status()]
    for number, loss in ((1, 0.75), (2, 0.5)):
        event = committed(number, 0.5)
        event.committed.metrics.CopyFrom(operator_pb2.Metrics(others={"training_loss": loss}))
        events.append(event)
    summary = summarise(reduce(observe, events, RunView()), clients=3)
    assert (summary.loss, summary.accuracy) == (None, None)
    measured, _ = run_figure(summary).axes
    assert measured.get_ylabel() == "training loss ↓"
    [line] = measured.lines
    assert np.asarray(line.get_ydata()).tolist() == [0.75, 0.5]
    evaluated = summary_of_two_rounds()
    assert "training_loss" not in {each.name for each in evaluated.measures}


def test_selection_matrix_has_a_row_per_client_and_a_column_per_round() -> None:
    summary = summary_of_two_rounds()
    assert clients_of(summary) == ["client-0", "client-1", "client-2", "client-10"]
    matrix = selection_matrix(summary.history, clients_of(summary))
    assert matrix.tolist() == [[1, 0], [1, 0], [1, 1], [0, 1]]


@pytest.mark.parametrize(
    ("clients", "hosts", "sizes"), [(24, 4, [6] * 4), (5, 2, [2, 3]), (3, 3, [1] * 3), (1, 1, [1])]
)
def test_clients_are_split_over_hosts_in_order(clients: int, hosts: int, sizes: list[int]) -> None:
    ranges = client_ranges(clients, hosts)
    assert [len(part) for part in ranges] == sizes
    assert [client for part in ranges for client in part] == list(range(clients))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count": 25}, "25 clients a round can't be chosen from 24"),
        ({"assignments": ["clients_per_round=30"]}, "30 clients a round"),
        ({"assignments": ["round.deadline=3"]}, r"unknown key 'round\.deadline'"),
    ],
)
def test_invalid_demo_options_are_refused_before_the_start(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        demo_run_file(options(**changes))


def test_error_about_an_unknown_selector_lists_the_installed_ones() -> None:
    with pytest.raises(PluginError, match=r"'powr' is not installed; installed: .*uniform"):
        demo_run_file(options(selector="powr"))


def test_demo_with_more_hosts_than_clients_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="3 clients can't be split over 4 hosts"):
        write_demo_files(tmp_path / "demo", options(clients=3, count=2), 7443)
    assert not (tmp_path / "demo").exists()


def test_demo_files_are_valid_configurations_of_a_federation(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    files = write_demo_files(folder, options(assignments=["training.epochs=2"]), 7443)
    run_file = parse_run_file(files.run_file, source="run.toml")
    assert (run_file.expected_clients, run_file.training) == (24, {"epochs": 2})
    assert (folder / "run.toml").read_text() == files.run_file
    hosts = [load_config(path, {}) for path in files.hosts]
    assert [host.clients for host in hosts] == [
        (f"client-{first}:{first + 5}",) for first in (0, 6, 12, 18)
    ]
    for host in hosts:
        host.tls.load()
        assert host.coordinator == "127.0.0.1:7443"
    operator = load_operator_config(OperatorFlags(config=folder / "operator.toml"), [])
    assert operator == files.operator
    assert tomllib.loads(files.coordinator.read_text())["listen"] == "127.0.0.1:7443"
    with pytest.raises(ConfigurationError, match="is not empty"):
        write_demo_files(folder, options(), 7443)


def test_a_reserved_port_can_be_listened_on() -> None:
    with reserved_port() as port, socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen()
        with socket.create_connection(("127.0.0.1", port)):
            pass


def test_printed_summary_names_the_improvement_and_the_result_files(tmp_path: Path) -> None:
    files = write_demo_files(tmp_path / "demo", options(), 7443)
    console = Console(file=io.StringIO(), width=300)
    with console.capture() as capture:
        print_summary(console, summary_of_two_rounds(), files, plot=str(files.plot))
    text = capture.get()
    assert "50.0 % → 75.0 %, over 3 of 6 clients, 120 samples, partial" in text
    assert "25.0 % → 37.5 %" in text
    for path in (files.model, files.summary, files.plot):
        assert str(path) in text


def run_of(selector: str, *accuracies: float, **changes: object) -> RunSummary:
    """Return a run with these worst-group accuracies; each round sends 1.2 MB to clients."""
    events = [status(), *(committed(i, 2 * each) for i, each in enumerate(accuracies, 1))]
    view = reduce(observe, events, RunView())
    return summarise(view, clients=24).model_copy(update={"selector": selector, **changes})


def test_comparison_contains_the_first_round_at_the_target_and_its_bytes() -> None:
    slow = run_of("uniform", 0.1, 0.1, 0.2, 0.3, 0.1, 0.3)
    quick = run_of("fair", 0.3, 0.4, 0.1, 0.5, 0.5, 0.5)
    compared = compare([slow, quick], target=0.4)
    assert compared is not None
    assert compared.measure.name == "worst_group_accuracy"
    first, second = compared.arms
    assert (first.selector, first.reached, first.bytes_to_target) == ("uniform", None, None)
    assert (second.selector, second.reached) == ("fair", 2)
    assert second.bytes_to_target == second.bytes_total / 3 > 0
    assert [first.last, second.last] == [pytest.approx(0.2), pytest.approx(0.4)]


def test_runs_without_a_worst_group_are_compared_by_accuracy() -> None:
    runs = [run_of("uniform", 0.25), run_of("fair", 0.3)]
    for run in runs:
        run.history[0] = run.history[0].model_copy(update={"worst_group_accuracy": None})
    compared = compare(runs, target=0.55)
    assert compared is not None
    assert (compared.measure.name, [arm.reached for arm in compared.arms]) == (
        "accuracy",
        [None, 1],
    )


def test_runs_without_a_metric_between_0_and_1_are_not_compared() -> None:
    runs = [run_of("uniform", 0.25, measures=[]), run_of("fair", 0.3, measures=[])]
    assert compare(runs, target=0.5) is None


def test_comparison_has_a_printed_column_and_a_drawn_line_per_selector(
    tmp_path: Path,
) -> None:
    compared = compare([run_of("uniform", 0.1, 0.2), run_of("fair", 0.2, 0.4)], target=0.4)
    assert compared is not None
    files = write_demo_files(tmp_path / "demo", options(), 7443)
    console = Console(file=io.StringIO(), width=300)
    with console.capture() as capture:
        print_comparison(console, compared, files, plot=str(files.plot))
    lines = [" ".join(line.split()) for line in capture.get().splitlines()]
    assert "worst group uniform fair" in lines
    assert "mean of the last 5 rounds 15.0 % 30.0 %" in lines
    assert "first round at 40.0 % not reached 2" in lines
    moved = readable_bytes(compared.arms[1].bytes_total)
    assert f"models moved to 40.0 % – {moved}" in lines
    drawn, *rasters = comparison_figure(compared).axes
    labels = drawn.get_legend_handles_labels()[1]
    assert labels == [f"{each} % in the last 5 rounds" for each in ("uniform: 15.0", "fair: 30.0")]
    assert [axes.get_ylabel() for axes in rasters] == ["selected by uniform", "selected by fair"]
    plot_comparison(compared, files.plot)
    assert files.plot.read_bytes().startswith(b"\x89PNG")


def test_readme_listing_has_the_lines_that_the_demo_prints(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    [listing] = re.findall(r"^```console\n(digits, .*?)^```$", readme, re.DOTALL | re.MULTILINE)
    default = {name: each.default for name, each in inspect.signature(demo).parameters.items()}
    compared = compare([run_of(each, 0.1) for each in COMPARED], target=default["target"])
    assert compared is not None
    files = write_demo_files(tmp_path / "demo", options(), 7443)
    console = Console(file=io.StringIO(), width=300)
    with console.capture() as capture:
        print_comparison(console, compared, files, plot="")
    printed = [re.split("  +", line) for line in capture.get().splitlines() if line]
    first, header, *rows = [re.split("  +", line) for line in listing.splitlines()]
    assert first[0].startswith(f"{default['task']}, {default['rounds']} rounds with ")
    assert [header, *(row[:1] for row in rows)] == [
        printed[1],
        *(row[:1] for row in printed[2 : 2 + len(rows)]),
    ]


def test_demos_started_in_the_same_second_get_separate_folders(tmp_path: Path) -> None:
    now = datetime(2026, 1, 2, 3, 4, 5)
    folders = [new_folder(tmp_path / "demos", now) for _ in range(3)]
    assert [each.name for each in folders] == [
        f"20260102-030405{number}" for number in ("", "-2", "-3")
    ]
    assert all(each.is_dir() for each in folders)
