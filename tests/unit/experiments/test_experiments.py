"""Experiments without federations: grids, numbers, tables."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import parquet
from rich.console import Console
from scipy import stats
from support.repository import ROOT

from potluck.common.errors import ConfigurationError, StorageError
from potluck.common.run_file.runfile import parse_run_file
from potluck.deploy.view.run_summary import CoverageSummary
from potluck.experiments.grid import grid_cells
from potluck.experiments.grid.definition import (
    ExperimentFile,
    load_experiment,
    merged,
    put,
    seeds_in,
)
from potluck.experiments.grid.experiment_progress import Board
from potluck.experiments.grid.grid_cells import cells_of
from potluck.experiments.grid.label_mix import LabelMixes
from potluck.experiments.grid.local_cells import BYTES_PER_PROCESS, jobs_for
from potluck.experiments.grid.results import CellResult, ResultsFolder, RoundResult, Timings
from potluck.experiments.presets import preset_named, preset_names, preset_run_file
from potluck.experiments.reports.experiment_summary import PairedTest, paired_test, summarise
from potluck.experiments.reports.plots import (
    held,
    included_matrix,
    metric_figure,
    plot_metric,
    raster_figure,
)
from potluck.experiments.reports.readings import best_of, reached, reading_of
from potluck.experiments.reports.report_files import html
from potluck.experiments.reports.tables import markdown, origin, ranked, tidy_rows, write_tables
from potluck.server.plan.plan import draw_up

READY = sorted((ROOT / "experiments").glob("*.toml"))

GRID: dict[str, Any] = {
    "name": "grid",
    "seeds": [0, 1],
    "run": {"rounds": 2, "clients_per_round": 2, "task": {"name": "digits", "clients": 6}},
    "axes": {
        "task.alpha": [0.1, 0.5],
        "selection": {
            "uniform": {"selector": {"name": "uniform"}},
            "dc": {"selector": {"name": "dc-random", "added": 1}, "clients_per_round": 3},
        },
    },
    "reading": {
        "metric": "accuracy",
        "columns": "task.alpha",
        "baseline": {"selection": "uniform"},
        "targets": [0.5],
        "published": [{"where": {"selection": "dc"}, "value": 0.9, "source": "Table 1"}],
    },
}


def experiment(**changes: Any) -> ExperimentFile:
    return ExperimentFile.model_validate(GRID | changes)


# Grids -----------------------------------------------------------------------------------------


def test_every_combination_of_axis_values_is_a_cell() -> None:
    cells = cells_of(experiment(), hosts=2, source=Path("grid.toml"))
    assert [cell.title for cell in cells][:4] == [
        "0.1 · uniform · seed 0", "0.1 · dc · seed 0",
        "0.5 · uniform · seed 0", "0.5 · dc · seed 0",
    ]  # fmt: skip
    assert len({cell.digest for cell in cells}) == 8
    run = parse_run_file(cells[5].run_file, source="cell")
    assert (run.seed, run.clients_per_round, run.expected_clients) == (1, 3, 6)
    assert run.task.options == {"clients": 6, "alpha": 0.1, "seed": 1}
    assert (run.selector.name, run.selector.options) == ("dc-random", {"added": 1})
    assert cells[5].disclosure["simulation_seed"] == 1


def test_cell_deadlines_are_long_enough_for_a_busy_machine() -> None:
    run = merged(GRID["run"], {"round": {"question_deadline_seconds": 3.0}})
    cell = cells_of(experiment(run=run), hosts=2, source=Path("grid.toml"))[0]
    parsed = parse_run_file(cell.run_file, source="cell")
    assert parsed.round.question_deadline_seconds == 3.0, "what the experiment sets holds"
    waits = (parsed.round.deadline_seconds, parsed.round.grace_seconds,
             parsed.profiles.deadline_seconds, parsed.start_timeout_seconds)  # fmt: skip
    assert min(waits) >= 3600


def test_renamed_settings_do_not_change_cell_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid_cells, "RELEASE", "0.1")
    plain = {"rounds": 2, "clients_per_round": 2, "task": {"name": "digits", "clients": 6}}
    stepwise = plain | {
        "clients_per_round": 4,
        "selector": {"name": "dc-balanced", "added": 1},
        "profiles": {"disclosure": "unsafe-stepwise", "sum_hosts": 3},
    }
    plans = [ExperimentFile(name="grid", seeds=(0,), run=run) for run in (plain, stepwise)]
    assert [cells_of(each, hosts=2, source=Path("grid.toml"))[0].digest for each in plans] == [
        "6a6a26f49c7f37a467575ea0060ece82",
        "2d3a1cafa75df6a7f639cb349b7064d3",
    ]


@pytest.mark.filterwarnings("ignore::potluck.common.settings.old_spelling.OldSpellingWarning")
def test_old_names_of_settings_in_an_experiment_are_accepted(tmp_path: Path) -> None:
    plan = """
name = "old"
preset = "fedentopt"
[run]
count = 5
[axes]
count = [3, 4]
[axes.selection]
few = { count = 2 }
as_given = { rounds = 2 }
[reading]
columns = "count"
baseline = { count = "3" }
[quick]
run.count = 2
"""
    new = plan.replace("count", "clients_per_round")
    found = []
    for name, text in (("old.toml", plan), ("new.toml", new)):
        (tmp_path / name).write_text(text)
        found.append(load_experiment(tmp_path / name, quick=True))
    assert found[0] == found[1]
    assert [run["clients_per_round"] for _, run in found[0].points()] == [2, 3, 2, 4]


def test_cell_digest_depends_only_on_settings_that_affect_the_result() -> None:
    def digest(**changes: Any) -> str:
        return cells_of(experiment(**changes), hosts=2, source=Path("grid.toml"))[0].digest

    assert digest() == digest(title="renamed")
    assert digest() != digest(run=merged(GRID["run"], {"rounds": 3}))
    assert digest() != digest(disclosure={"epsilon": 0.5})


def test_replaced_plugin_name_removes_the_options_of_the_previous_plugin() -> None:
    table = {"selector": {"name": "fedentopt", "buffer": 7}}
    put(table, "selector.name", "uniform")
    assert table == {"selector": {"name": "uniform"}}
    assert merged({"task": {"name": "digits", "alpha": 1}}, {"task": {"name": "mnist"}}) == {
        "task": {"name": "mnist"}
    }


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"axes": {"seed": [1, 2]}}, "seeds are given as seeds"),
        ({"axes": {"clients_per_round": []}}, "axis 'clients_per_round' has no values"),
        ({"axes": {"clients_per_round": [1, 1]}}, "axis 'clients_per_round' has a value twice"),
        ({"seeds": [1, 1]}, "distinct whole numbers"),
        ({"reading": {"columns": "beta"}}, "axis 'beta' does not exist"),
        ({"reading": {"baseline": {"selection": "kl"}}}, "axis 'selection' has no value 'kl'"),
        ({"preset": "flower"}, "unknown preset 'flower'; presets: clustered-sampling, dc"),
        ({"run": {"task": {"name": "nothing"}}}, "'nothing' is not installed"),
        ({"run": {"rounds": 1}}, r"run\.task\.name is missing"),
        ({"run": merged(GRID["run"], {"clients_per_round": 9})}, "'expected_clients' is only 6"),
    ],
)
def test_mistakes_in_an_experiment_file_are_named(
    changes: dict[str, Any], why: str, tmp_path: Path
) -> None:
    from potluck.common.settings.configuration import validate

    with pytest.raises(ConfigurationError, match=why):
        cells_of(
            validate(ExperimentFile, GRID | changes, source="grid.toml"),
            hosts=1,
            source=Path("grid.toml"),
        )


@pytest.mark.parametrize("path", READY, ids=lambda path: path.stem)
@pytest.mark.parametrize("quick", [False, True])
def test_shipped_experiment_files_are_valid(path: Path, quick: bool) -> None:
    plan = load_experiment(path, quick=quick)
    assert len(plan.seeds) >= 3
    plan = plan.model_copy(
        update={"seeds": plan.seeds[:1]}
    )  # one seed is enough to compare settings
    cells = cells_of(plan, hosts=plan.hosts, source=path)
    assert len({cell.digest for cell in cells}) == len(cells)
    assert bool(plan.assumptions()) == (plan.preset is not None)


@pytest.mark.parametrize(
    ("text", "seeds"), [("0-3", (0, 1, 2, 3)), ("7", (7,)), ("5, 0-1,9-9", (5, 0, 1, 9))]
)
def test_seed_list_accepts_numbers_and_ranges(text: str, seeds: tuple[int, ...]) -> None:
    assert seeds_in(text) == seeds


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "must be numbers and ranges, such as 0-9 or 0,3,5-7; got ''"),
        ("-1", "must be numbers and ranges"),
        ("1.5", "must be numbers and ranges"),
        ("0,,1", "must be numbers and ranges"),
        ("0:9", "must be numbers and ranges"),
        ("٣", "must be numbers and ranges"),
        ("9-0", "has the descending range 9-0"),
        ("0-2,1", "has a seed twice"),
        ("0-20261123", "must have at most 10000 seeds"),
        ("0-9998,20000-20001", "must have at most 10000 seeds"),
    ],
)
def test_an_invalid_list_of_seeds_is_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^--seeds {why}"):
        seeds_in(text)


@pytest.mark.parametrize("quick", [False, True])
def test_additional_seeds_do_not_change_the_cells_of_the_file(quick: bool) -> None:
    path = ROOT / "experiments" / "feddiverse-same-start.toml"

    def digests(seeds: tuple[int, ...] | None) -> list[str]:
        plan = load_experiment(path, quick=quick, seeds=seeds)
        return [cell.digest for cell in cells_of(plan, hosts=plan.hosts, source=path)]

    own, more = digests(None), digests((0, 1, 2, 3))
    assert more[: len(own)] == own
    assert len(set(more)) == len(more) == len(own) // 3 * 4


def test_value_missing_from_a_paper_is_reported_unless_every_arm_sets_it() -> None:
    def told(**axes: Any) -> set[str]:
        run = {"task": {"name": "cifar10"}}
        plan = experiment(preset="fedentopt", run=run, axes=axes, reading={})
        return {each.key for each in plan.assumptions()}

    buffered = {"selector": {"name": "fedentopt", "buffer": 50}}
    assert "selector.buffer" in told(
        selection={"paper": {"clients_per_round": 10}, "short": buffered}
    )
    assert "selector.buffer" not in told(selection={"short": buffered})
    assert "task.clients" not in told(**{"task.clients": [50, 100]})


def test_experiment_files_of_four_papers_are_shipped() -> None:
    assert {"dc-mnist", "feddiverse-cmnist", "fedentopt-cifar10", "flash-cifar10"} <= {
        path.stem for path in READY
    }


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_is_a_valid_run_file_that_marks_assumed_values(name: str) -> None:
    preset = preset_named(name)
    text = preset_run_file(preset)
    assert parse_run_file(text, source=name).task.name == preset.run["task"]["name"]
    assert text.count("assumed: ") == len(preset.assumptions)
    plan = draw_up(text, source=name)
    assert set(preset.disclosure.get("questions", ())) == plan.selector.asks_questions


def test_rhfl_logits_preset_has_four_kinds_of_networks() -> None:
    [*kinds] = preset_named("rhfl-logits").run["model"]["of"]
    assert (
        len({kind["name"] for kind in kinds})
        == preset_named("rhfl-logits").run["expected_clients"]
        == 4
    )


def test_number_of_parallel_cells_is_limited_by_processors_and_memory() -> None:
    plenty = 2**40
    assert jobs_for(2, 100, processors=2, memory=plenty) == 2
    assert jobs_for(2, 100, processors=64, memory=plenty) == 53
    assert jobs_for(2, 5, processors=64, memory=plenty) == 5
    assert jobs_for(2, 100, processors=64, memory=9 * BYTES_PER_PROCESS) == 3
    assert jobs_for(64, 100, processors=1, memory=0) == 1


# Numbers ---------------------------------------------------------------------------------------


def rounds(*accuracies: float | None, included: int = 2) -> list[RoundResult]:
    return [
        RoundResult(
            round=number, selected=[f"client-{n}" for n in range(3)],
            included=[f"client-{n}" for n in range(included)], accuracy=accuracy,
            worst_group_accuracy=None, weighted_f1=accuracy, loss=None, entropy=1.5,
            bytes_down=100, bytes_up=50,
        )
        for number, accuracy in enumerate(accuracies, start=1)
    ]  # fmt: skip


def ran(selector: str) -> str:
    return (
        'rounds = 2\nclients_per_round = 2\ntask = {name = "digits", clients = 6}\n'
        f'selector = {{name = "{selector}"}}\n'
    )


def result(selection: str, alpha: str, seed: int, *accuracies: float | None) -> CellResult:
    found = rounds(*accuracies, included=3 if selection == "dc" else 2)
    return CellResult(
        labels={"task.alpha": alpha, "selection": selection, "seed": str(seed)},
        digest=f"{selection}{alpha}{seed}", run_file=ran(selection), clients=6, hosts=2,
        rounds=found, model_blake3="", version="0.1.0",
        timings=Timings(rounds=[0.5] * len(found), total=3.0),
    )  # fmt: skip


def results() -> list[CellResult]:
    return [
        result("uniform", "0.1", 0, 0.2, 0.4), result("uniform", "0.1", 1, 0.3, 0.5),
        result("dc", "0.1", 0, 0.5, 0.6), result("dc", "0.1", 1, 0.4, 0.8),
        result("uniform", "0.5", 0, 0.6, 0.7), result("uniform", "0.5", 1, 0.6, 0.7),
    ]  # fmt: skip


def test_reading_of_a_cell_is_the_mean_of_its_last_evaluations() -> None:
    found = rounds(0.1, None, 0.3, None, 0.5)
    assert reading_of(found, "accuracy", 1) == 0.5
    assert reading_of(found, "accuracy", 2) == pytest.approx(0.4)
    assert math.isnan(reading_of(rounds(None), "accuracy", 1))
    assert reached(found, "accuracy", 0.3) == 3
    assert reached(found, "accuracy", 0.6) is None


def test_infinite_loss_is_no_number_and_not_that_of_an_earlier_round() -> None:
    found = rounds(0.5, 0.5, 0.5)  # their losses are infinite
    found[0] = found[0].model_copy(update={"loss": 0.3})
    assert math.isnan(reading_of(found, "loss", 1))
    assert best_of(found, "loss") == (1, 0.3)
    assert math.isnan(reading_of(rounds(None), "loss", 1))


def test_cell_without_an_evaluation_is_a_dash_in_the_table() -> None:
    found = [result("uniform", "0.1", 0, 0.5), result("dc", "0.1", 0, None)]
    assert "nan" not in markdown(summarise(experiment(), found, missing=0))


def test_partial_evaluations_are_marked_and_do_not_count_as_best_or_target() -> None:
    behind = CoverageSummary(clients=3, asked=6, samples=120, partial=True)
    whole = CoverageSummary(clients=6, asked=6, samples=240, partial=False)
    found = rounds(0.3, 0.5, 0.9)
    found[0].coverage["accuracy"] = found[1].coverage["accuracy"] = whole
    found[2].coverage["accuracy"] = behind
    assert best_of(found, "accuracy") == (2, 0.5)
    assert reached(found, "accuracy", 0.6) is None
    assert reading_of(found, "accuracy", 1) == 0.9
    cell = result("uniform", "0.1", 0, 0.3).model_copy(update={"rounds": found})
    text = markdown(summarise(experiment(), [cell, result("dc", "0.1", 0, 0.2)], missing=0))
    assert "(partial)" in text
    assert "Accuracy is over 3 to 6 clients and 120 to 240 samples in each evaluation." in text
    assert "1 of 4 evaluations are **partial**" in text
    row = tidy_rows([cell])[2]
    assert (row["accuracy_clients"], row["accuracy_asked"], row["accuracy_samples"]) == (3, 6, 120)
    assert (row["accuracy_partial"], row["loss_partial"]) == (True, None)


def test_paired_test_equals_the_t_test_of_scipy() -> None:
    ours, base = {"0": 0.8, "1": 0.7, "2": 0.9, "3": 0.1}, {"0": 0.5, "1": 0.6, "2": 0.7}
    found = paired_test(ours, base)
    expected = stats.ttest_rel([0.8, 0.7, 0.9], [0.5, 0.6, 0.7])
    interval = expected.confidence_interval(0.95)
    assert found is not None
    assert found.pairs == 3
    assert found.difference == pytest.approx(0.2)
    assert found.low == pytest.approx(interval.low)
    assert found.high == pytest.approx(interval.high)
    assert found.p == pytest.approx(expected.pvalue)


def test_paired_test_without_enough_pairs_gives_no_p_value() -> None:
    assert paired_test({"0": 1.0}, {"1": 1.0}) is None
    one = paired_test({"0": 1.0}, {"0": 0.5})
    same = paired_test({"0": 1.0, "1": 1.0}, {"0": 0.5, "1": 0.5})
    assert one is not None
    assert same is not None
    assert (one.p, same.p) == (None, None)


def test_arms_with_equal_values_in_all_seeds_have_p_1() -> None:
    found = paired_test({"0": 0.7, "1": 0.8}, {"0": 0.7, "1": 0.8})
    assert found == PairedTest(pairs=2, difference=0.0, low=0.0, high=0.0, p=1.0)


def test_arms_are_compared_with_the_baseline_of_the_same_column() -> None:
    summary = summarise(experiment(), results(), missing=2)
    by_labels = {tuple(arm.labels.values()): arm for arm in summary.arms}
    assert set(by_labels) == {("0.1", "uniform"), ("0.1", "dc"), ("0.5", "uniform")}
    arm = by_labels["0.1", "dc"]
    assert arm.mean == pytest.approx(0.7)
    assert arm.deviation == pytest.approx(0.1 * math.sqrt(2))
    assert arm.test is not None
    assert arm.test.difference == pytest.approx(0.25)
    assert not arm.same_cohorts
    assert by_labels["0.5", "uniform"].test is None
    [cost] = arm.costs
    assert (cost.reached, cost.round, cost.bytes, cost.seconds) == (2, 1.5, 225, 0.75)


# Tables ----------------------------------------------------------------------------------------


def test_best_value_is_bold_and_the_second_best_underlined() -> None:
    mark = ranked([0.5, 0.9, 0.9, 0.7, math.nan], lower=False)
    assert [mark(value, "x") for value in (0.9, 0.7, 0.5, math.nan)] == [
        "**x**", "<u>x</u>", "x", "x",
    ]  # fmt: skip
    assert ranked([0.5, 0.9], lower=True)(0.5, "x") == "**x**"


def test_markdown_summary_states_means_gaps_and_the_test() -> None:
    text = markdown(summarise(experiment(), results(), missing=2))
    assert "| uniform | <u>0.4500 ± 0.0707</u> | 0.7000 ± 0.0000 |" in text
    assert "| dc | **0.7000 ± 0.1414** | – |" in text
    assert "**2 cells not finished yet.**" in text
    assert "3 ≠" in text
    assert "0.9 (Table 1)" in text
    assert "paired t test" in text


def test_cells_that_stopped_early_are_reported_and_keep_their_last_value() -> None:
    stopping = 'rounds = 4\n[task]\nname = "digits"\n[stop]\nmeasure = "accuracy"\npatience = 1\n'
    early = result("uniform", "0.1", 0, 0.2, 0.4).model_copy(update={"run_file": stopping})
    whole = result("uniform", "0.1", 1, 0.3, 0.5, 0.6, 0.7).model_copy(
        update={"run_file": stopping}
    )
    assert (early.stopped_early, whole.stopped_early) == (True, False)
    summary = summarise(experiment(), [early, whole], missing=0)
    [arm] = summary.arms
    assert arm.mean == pytest.approx(0.55)  # mean of the cells' last evaluations
    assert arm.bytes == pytest.approx(150 * 3)
    assert "1 cell stopped early, as [stop] says, after 2 rounds" in markdown(summary)
    assert "stopped early" not in markdown(summarise(experiment(), results(), missing=0))
    held_values = held([[(1, 0.2), (2, 0.4)], [(1, 0.3), (3, 0.6)], []])
    assert held_values == [[(1, 0.2), (2, 0.4), (3, 0.4)], [(1, 0.3), (3, 0.6)], []]


def test_progress_board_counts_a_cell_that_stopped_early_as_finished() -> None:
    cells = cells_of(experiment(), hosts=1, source=Path("grid.toml"))[:2]
    output = io.StringIO()
    with Board(Console(file=output, width=200)) as board:
        board.begin(cells, {})
        for cell in cells:
            with board.cell(cell) as progress:
                progress(1)
        assert board.remaining() == 0
    assert "2/2" in output.getvalue()


def test_result_table_contains_no_measured_times(tmp_path: Path) -> None:
    write_tables(results(), tmp_path)
    table = parquet.read_table(tmp_path / "rounds.parquet").to_pylist()
    assert table == tidy_rows(results())
    assert len(table) == 12
    assert [name for name in table[0] if "second" in name] == ["simulated_seconds"]
    assert "seconds" in (tmp_path / "timings.csv").read_text().splitlines()[0]


def test_html_report_is_one_page_with_escaped_text() -> None:
    plan = experiment(title="<script>alert(1)</script>")
    summary = summarise(plan, results(), missing=0)
    page = html(summary, {"metric": plot_metric(summary)})
    assert "<script>" not in page
    assert page.count("data:image/png;base64,") == 3
    assert "http" not in page.replace("data:", "")
    assert "<strong>0.7000 ± 0.1414</strong>" in page


def test_report_states_the_software_plugins_and_quick_mode() -> None:
    whole, quick = (summarise(experiment(), results(), 0, quick=quick) for quick in (False, True))
    runs = "task digits · selectors uniform, dc · strategy fedavg · objective cross-entropy"
    assert origin(whole) == f"{runs} · 2 rounds · Potluck 0.1.0"
    assert origin(quick).startswith(origin(whole))
    for page in (markdown(quick), html(quick, {"metric": plot_metric(quick)})):
        assert origin(quick) in page
        assert "quick" in origin(quick)
    [first, *rest] = results()
    earlier = first.model_copy(update={"version": ""})
    assert "Potluck 0.1.0, of unknown version" in origin(
        summarise(experiment(), [earlier, *rest], 0)
    )


@pytest.mark.parametrize("count", [1, 2, 3])
def test_plot_axes_of_rounds_and_clients_have_integer_ticks(count: int) -> None:
    found = [result("uniform", "0.1", seed, *[0.5] * count) for seed in (0, 1)]
    summary = summarise(experiment(), found, missing=0)
    for figure in (metric_figure(summary), raster_figure(summary)):
        figure.canvas.draw()
        [axes, *_] = figure.axes
        low, high = axes.get_xlim()
        shown = [tick for tick in axes.get_xticks() if low <= tick <= high]
        assert shown == [*map(int, shown)]
        assert set(range(1, count + 1)) <= set(shown)
    [axes, *_] = raster_figure(summary).axes
    assert [*axes.get_yticks()] == [*map(int, axes.get_yticks())]


def test_plot_bands_are_the_standard_deviations_of_the_tables() -> None:
    found = [result("uniform", "0.1", seed, 0.2 * (seed + 1)) for seed in (0, 1)]
    [band] = metric_figure(summarise(experiment(), found, missing=0)).axes[0].collections
    heights = np.asarray(band.get_paths()[0].vertices)[:, 1]
    assert min(heights) == pytest.approx(0.3 - 0.2 / math.sqrt(2))
    assert max(heights) == pytest.approx(0.3 + 0.2 / math.sqrt(2))


def test_included_matrix_has_a_row_per_client_and_a_column_per_round() -> None:
    matrix = included_matrix(rounds(0.1, 0.2), clients=4)
    assert matrix.tolist() == [[1, 1], [1, 1], [0, 0], [0, 0]]


# Keeping ---------------------------------------------------------------------------------------


def test_stored_cell_result_is_found_after_its_labels_change(tmp_path: Path) -> None:
    cell = cells_of(experiment(), hosts=2, source=Path("grid.toml"))[0]
    folder = ResultsFolder(tmp_path)
    folder.opened().close()
    assert folder.find(cell) is None
    folder.keep(cell, results()[0])
    found = folder.find(cell)
    assert found is not None
    assert (found.labels, found.rounds) == (dict(cell.labels), results()[0].rounds)


def test_damaged_cell_result_is_refused_with_the_remedy(tmp_path: Path) -> None:
    cell = cells_of(experiment(), hosts=2, source=Path("grid.toml"))[0]
    folder = ResultsFolder(tmp_path)
    folder.opened().close()
    (folder.cells / f"{cell.digest}.json").write_text("{")
    with pytest.raises(StorageError, match="remove the file, and the cell will run again"):
        folder.find(cell)


def test_cohort_entropy_is_computed_from_the_true_labels() -> None:
    cell = cells_of(experiment(), hosts=2, source=Path("grid.toml"))[0]
    mix = LabelMixes(None).of(cell)
    assert mix.counts.shape == (6, 10)
    shares = mix.counts[[1, 4]].sum(axis=0) / mix.counts[[1, 4]].sum()
    expected = -sum(share * np.log2(share) for share in shares if share)
    assert mix.entropy(["client-1", "client-4"]) == pytest.approx(expected)
    assert mix.entropy([]) == 0
    run = experiment().run
    noisy = experiment(run={**run, "task": {**run["task"], "label_noise": 0.5}})
    cell = cells_of(noisy, hosts=2, source=Path("grid.toml"))[0]
    assert "label_noise" in cell.task_text
    assert LabelMixes(None).of(cell).counts.tolist() == mix.counts.tolist(), "labels as they were"
