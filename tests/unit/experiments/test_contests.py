"""Contests of arms: readings at equal budgets, selection counts, mean ranks, tables."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from potluck.common.disclosure import TRIPLET, Mode, Parameters, TaskReference
from potluck.common.errors import ConfigurationError
from potluck.common.learning.triplet import TripletSettings
from potluck.common.settings.configuration import validate
from potluck.deploy.view.run_summary import CoverageSummary
from potluck.experiments.grid.cell_run import costs_of
from potluck.experiments.grid.definition import ExperimentFile, merged
from potluck.experiments.grid.grid_cells import cells_of
from potluck.experiments.grid.label_mix import LabelMixes, traits_of
from potluck.experiments.grid.results import Before, CellResult, RoundResult, Timings
from potluck.experiments.reports.contest_tables import contest_table
from potluck.experiments.reports.contests import EQUAL, LAST, contests_of, ranked_readings, together
from potluck.experiments.reports.differences import (
    difference_table,
    differences,
    told_apart_table,
)
from potluck.experiments.reports.experiment_summary import summarise
from potluck.experiments.reports.heat_maps import heat_maps, leaning_panels, measure_panel
from potluck.experiments.reports.plots import first_ranks, in_colour, plot_ranks
from potluck.experiments.reports.ranks import critical_difference, holm, mean_ranks
from potluck.experiments.reports.readings import (
    best_of,
    common_budget,
    leaning,
    picks_of,
    spent_bytes,
    spent_seconds,
    within,
)
from potluck.experiments.reports.report_files import report_text
from potluck.server.store import Store
from potluck.server.store.records import Profile

GRID: dict[str, Any] = {
    "name": "contest",
    "seeds": [0, 1],
    "run": {"rounds": 3, "clients_per_round": 2, "task": {"name": "digits", "clients": 4}},
    "axes": {
        "scenario": {
            "noise": {"task": {"label_noise": 0.3, "noisy_clients": 0.5}},
            "drop-outs": {
                "virtual_clock": {
                    "enabled": True,
                    "draw": "client",
                    "deadline_seconds": 1e6,
                    "drop_outs": {"client-0:1": 0.25},
                    "slower": {"client-3": 4.0},
                }
            },
        },
        "selection": {
            "uniform": {"selector": {"name": "uniform"}},
            "flash": {"selector": {"name": "flash"}},
            "round-robin": {"selector": {"name": "round-robin"}},
        },
    },
    "reading": {
        "compared": "selection",
        "also": ["worst_tenth"],
        "baseline": {"selection": "uniform"},
    },
}
PLAN = ExperimentFile.model_validate(GRID)


def cell(
    selection: str = "uniform",
    scenario: str = "noise",
    seed: int = 0,
    *,
    accuracies: tuple[float | None, ...] = (0.5, 0.7, 0.6),
    picks: tuple[tuple[int, ...], ...] = ((0, 1), (0, 1), (0, 2)),
    downloads: int = 2,
    seconds: float | None = 10.0,
    before: Before | None = None,
    traits: dict[str, list[float]] | None = None,
) -> CellResult:
    rounds = [
        RoundResult(
            round=number, selected=[f"client-{k}" for k in chosen],
            included=[f"client-{k}" for k in chosen], accuracy=accuracy,
            worst_group_accuracy=None, weighted_f1=accuracy, loss=None, entropy=1.5, bytes_down=100,
            bytes_up=50, downloads=downloads, simulated_seconds=seconds,
            worst_tenth=None if accuracy is None else accuracy / 2,
        )
        for number, (accuracy, chosen) in enumerate(zip(accuracies, picks, strict=True), start=1)
    ]  # fmt: skip
    return CellResult(
        labels={"scenario": scenario, "selection": selection, "seed": str(seed)},
        digest=f"{selection}{scenario}{seed}", run_file='[task]\nname = "digits"\n',
        clients=4, hosts=1, rounds=rounds,
        model_blake3="", timings=Timings(rounds=[0.5] * len(rounds), total=3.0), model_bytes=100,
        before=before or Before(), traits=traits or {},
    )  # fmt: skip


# Readings --------------------------------------------------------------------------------------


def test_best_evaluation_is_the_first_with_the_highest_value() -> None:
    assert best_of(cell(accuracies=(0.5, 0.7, 0.7)).rounds, "accuracy") == (2, 0.7)
    assert best_of(cell(accuracies=(None, None, None)).rounds, "accuracy") is None


def test_spent_bytes_and_seconds_include_downloads_and_pretraining() -> None:
    """A round has two downloads of 100 bytes, and 50 bytes of updates; pre-training is charged
    before round 1."""
    assert spent_bytes(cell()) == [250, 500, 750]
    assert spent_bytes(cell(before=Before(bytes=1000, seconds=5.0))) == [1250, 1500, 1750]
    assert spent_seconds(cell(before=Before(bytes=0, seconds=5.0))) == [15.0, 25.0, 35.0]
    assert spent_seconds(cell(seconds=None)) is None


def test_spent_bytes_include_the_model_used_for_triplet_estimates(tmp_path: Path) -> None:
    """Only estimated triplets need the model; triplets from matrices or a profile file do not."""
    with Store.open(f"sqlite:///{tmp_path / 'potluck.sqlite3'}") as store:
        for client, model in (("client-0", "ab" * 32), ("client-1", "ab" * 32), ("client-2", None)):
            parameters = Parameters(
                mode=Mode.EXACT_TRIPLET,
                task=TaskReference(name="digits"),
                model=model,
                settings=TripletSettings(),
            )
            store.put_profile(
                Profile(
                    client_id=client,
                    data_epoch=1,
                    signal=TRIPLET,
                    parameters_json=parameters.canonical(),
                    payload_json=json.dumps({"triplet": [0.1, 0.2, 0.3]}),
                    signature=None,
                    received_at=datetime.now(UTC),
                )
            )
    costs = costs_of(cells_of(PLAN, hosts=1, source=Path("contest.toml"))[0], tmp_path, "some")
    assert costs.model_bytes > 0
    assert costs.before.bytes == 2 * costs.model_bytes


def test_extra_tensors_of_a_strategy_are_charged_to_training_clients_only(tmp_path: Path) -> None:
    """FedBiO sends extra tensors as large as the model, only to clients that train."""
    grid = merged(GRID, {"run": {"strategy": {"name": "fedbio"}}})
    grid["axes"].pop("scenario")
    fedbio = cells_of(ExperimentFile.model_validate(grid), hosts=1, source=Path("contest.toml"))[0]
    plain = cells_of(PLAN, hosts=1, source=Path("contest.toml"))[0]
    found = costs_of(fedbio, tmp_path, "some")
    assert found.strategy_bytes == found.model_bytes
    assert costs_of(plain, tmp_path, "some").strategy_bytes == 0
    asking = cell(downloads=4).model_copy(update={"strategy_bytes": 30})
    assert spent_bytes(asking) == [4 * 100 + 2 * 30 + 50, 1020, 1530]


def test_common_budget_is_the_spending_of_the_cheapest_run() -> None:
    thrifty, asking = cell(), cell(downloads=4)
    budget = common_budget([thrifty, asking], spent_bytes, "accuracy")
    assert budget == 750
    assert within(thrifty, spent_bytes, budget, "accuracy", 1) == 0.6
    assert within(asking, spent_bytes, budget, "accuracy", 1) == 0.5, "one round costs it 450"
    assert math.isnan(within(asking, spent_bytes, 100, "accuracy", 1))
    assert common_budget([thrifty, cell(seconds=None)], spent_seconds, "accuracy") is None


def test_run_finished_within_the_budget_keeps_its_result() -> None:
    quick = cell(seconds=2.0)
    slow = cell(accuracies=(None, 0.3, 0.4), seconds=10.0)
    budget = common_budget([quick, slow], spent_seconds, "accuracy")
    assert budget == 20, "of 6 and 30 seconds; the slow one is evaluated after 20"
    assert within(quick, spent_seconds, budget, "accuracy", 1) == 0.6
    assert within(slow, spent_seconds, budget, "accuracy", 1) == 0.3


def test_selection_evenness_is_one_minus_the_gini_coefficient() -> None:
    alike = picks_of(cell(picks=((0, 1), (2, 3), (0, 1))))
    counts = np.array([2.0, 2.0, 1.0, 1.0])
    gini = np.abs(counts[:, None] - counts).sum() / (2 * 4 * counts.sum())
    assert alike.evenness == pytest.approx(1 - gini)
    assert alike.never == 0.0
    assert alike.most == pytest.approx(2 / 3)
    alone = picks_of(cell(picks=((0,), (0,), (0,))))
    assert alone.evenness == pytest.approx(0.25)
    assert (alone.never, alone.most) == (0.75, 1.0)


def test_leaning_is_the_correlation_of_selections_with_a_client_trait() -> None:
    """Selection counts are 3, 2, 1 and 0."""
    found = leaning(cell(traits={"wrong labels": [0.0, 0.1, 0.4, 0.5]}), "wrong labels")
    assert found is not None
    assert found.correlation == pytest.approx(-1.0)
    assert found.picked == pytest.approx((3 * 0.0 + 2 * 0.1 + 1 * 0.4) / 6)
    assert found.all == pytest.approx(0.25)
    assert leaning(cell(traits={"samples": [7.0] * 4}), "samples") is None
    assert leaning(cell(), "samples") is None


def test_client_traits_are_those_that_the_run_simulates() -> None:
    cells = cells_of(PLAN, hosts=1, source=Path("contest.toml"))
    mixes = LabelMixes(None)
    noisy = traits_of(cells[0], mixes.of(cells[0]))
    assert sorted(rate > 0.1 for rate in noisy["wrong labels"]) == [False, False, True, True]
    assert "chance to drop out" not in noisy
    dropping = traits_of(cells[3], mixes.of(cells[3]))
    assert dropping["chance to drop out"] == [0.25, 0.25, 0.0, 0.0]
    assert sum(dropping["samples"]) == 1397
    assert "wrong labels" not in dropping
    assert len(dropping["seconds per sample"]) == 4
    assert cells[3].availability == {"client-0": 0.75, "client-1": 0.75}


def test_speeds_of_a_trace_are_not_drawn_speeds() -> None:
    clock = {"enabled": True, "draw": "client", "trace": "nights.csv", "deadline_seconds": 60.0}
    run = {"task": {"name": "digits", "clients": 2}, "rounds": 1, "clients_per_round": 1}
    plan = {"name": "x", "title": "x", "seeds": [0], "axes": {}}
    plan |= {"run": run | {"virtual_clock": clock}}
    [cell] = cells_of(ExperimentFile.model_validate(plan), hosts=1, source=Path("x.toml"))
    assert "seconds per sample" not in traits_of(cell, LabelMixes(None).of(cell))


# Ranks -----------------------------------------------------------------------------------------


def test_mean_ranks_share_ties_and_put_missing_values_last() -> None:
    also = 3 * 0.3  # differs from 0.9 in the last bit
    assert also != 0.9
    found = mean_ranks([{"a": 0.9, "b": 0.5, "c": math.nan}, {"a": 0.9, "b": also, "c": 0.1}])
    assert found is not None
    assert dict(found.means) == {"a": 1.25, "b": 1.75, "c": 3.0}
    lower = mean_ranks([{"a": 0.9, "b": 0.5}], lower=True)
    assert lower is not None
    assert dict(lower.means) == {"b": 1.0, "a": 2.0}
    assert (lower.p, lower.difference) == (None, None)
    assert mean_ranks([]) is None


def test_only_arms_that_every_comparison_has_are_ranked() -> None:
    found = mean_ranks([{"a": 1.0, "b": 0.5}, {"a": 1.0}])
    assert found is not None
    assert list(found.means) == ["a"]


def test_critical_difference_equals_the_published_table() -> None:
    """Demšar 2006, Table 5: q is 2.343 for 3 classifiers, 2.728 for 5, 3.164 for 10."""
    for arms, q in ((3, 2.343), (5, 2.728), (10, 3.164)):
        expected = q * math.sqrt(arms * (arms + 1) / (6 * 14))
        assert critical_difference(arms, 14) == pytest.approx(expected, rel=1e-3)
    assert critical_difference(1, 14) is None


def test_nemenyi_test_and_critical_difference_agree() -> None:
    """An arm is significantly behind the first one if and only if their mean ranks differ by more
    than the critical difference; p is that of the studentized range."""
    generator = np.random.default_rng(0)
    behind = 0
    for arms in range(2, 12):
        table = generator.normal(np.linspace(1.5, 0, arms), size=(12, arms))
        names = "abcdefghijkl"[:arms]
        found = mean_ranks([dict(zip(names, row, strict=True)) for row in table.tolist()])
        assert found is not None
        assert found.difference is not None
        assert list(found.behind) == list(found.means)
        first = min(found.means.values())
        for arm, mean in found.means.items():
            assert (mean - first > found.difference) == (found.behind[arm] < 0.05)
            q = (mean - first) / math.sqrt(arms * (arms + 1) / (6 * 12)) * math.sqrt(2)
            expected = stats.studentized_range.sf(q, arms, np.inf) if q else 1.0
            assert found.behind[arm] == pytest.approx(expected, abs=1e-6)
            behind += found.behind[arm] < 0.05
    assert behind >= 10


def test_friedman_test_equals_that_of_scipy() -> None:
    blocks = [
        dict(zip("abc", row, strict=True))
        for row in np.random.default_rng(0).normal([0.0, 0.5, 2.0], size=(12, 3))
    ]
    found = mean_ranks(blocks)
    assert found is not None
    columns = [[block[arm] for block in blocks] for arm in "abc"]
    assert found.p == pytest.approx(stats.friedmanchisquare(*columns).pvalue)
    assert found.best[0] == "c"
    assert "a" not in found.best


def test_no_arm_is_worse_if_the_friedman_test_is_not_significant() -> None:
    """By chance, the best and the worst of twelve arms may differ by more than the critical
    difference."""
    rows = (
        (1, 3, 11, 9, 2, 4, 7, 10, 5, 6, 0, 8), (9, 5, 8, 2, 0, 7, 6, 1, 4, 3, 11, 10),
        (5, 9, 10, 4, 0, 3, 1, 2, 11, 6, 8, 7), (11, 7, 10, 8, 2, 3, 5, 4, 9, 1, 0, 6),
    )  # fmt: skip
    found = mean_ranks([dict(zip("abcdefghijkl", map(float, row), strict=True)) for row in rows])
    assert found is not None
    assert found.p is not None
    assert found.difference is not None
    means = list(found.means.values())
    assert found.p > 0.05
    assert means[-1] - means[0] > found.difference
    assert len(found.best) == 12


def test_holm_correction_equals_hand_computed_values() -> None:
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.9}) == {
        "a": 0.04, "c": pytest.approx(0.09), "b": pytest.approx(0.09), "d": 0.9,
    }  # fmt: skip


def test_comparisons_without_a_test_count_in_holm_correction() -> None:
    assert holm({"a": 0.01, "b": None, "c": 0.4}) == {"a": pytest.approx(0.03), "c": 0.8}


# Contests --------------------------------------------------------------------------------------


def results() -> list[CellResult]:
    return [
        cell(
            selection,
            scenario,
            seed,
            accuracies=(0.4, 0.5, level + 0.01 * seed),
            downloads=4 if selection == "flash" else 2,
            traits={"wrong labels": [0.0, 0.1, 0.4, 0.5]} if scenario == "noise" else {},
        )
        for selection, level in (("uniform", 0.7), ("flash", 0.9), ("round-robin", 0.8))
        for scenario in ("noise", "drop-outs")
        for seed in (0, 1)
    ]


def test_arms_of_one_scenario_form_a_contest() -> None:
    summary = summarise(PLAN, results(), missing=0)
    contests = contests_of(summary)
    assert [contest.title for contest in contests] == ["scenario = noise", "scenario = drop-outs"]
    flash = contests[0].arms[1]
    assert flash.name == "flash"
    assert flash.readings["accuracy", LAST] == {"0": 0.9, "1": 0.91}
    assert flash.readings["accuracy", EQUAL + "bytes"] == {"0": 0.4, "1": 0.4}
    assert contests[0].budgets[EQUAL + "bytes"] == 750
    ranks = {(r.measure, r.reading): r for r in ranked_readings(summary, contests)}
    last, equal = ranks["accuracy", LAST], ranks["accuracy", EQUAL + "bytes"]
    assert list(last.by_cell.means) == ["flash", "round-robin", "uniform"]
    assert (last.by_cell.blocks, last.by_contest.blocks) == (4, 2)
    assert list(equal.by_cell.means)[-1] == "flash", "it asks everybody, and pays for it"
    assert ("worst_tenth", LAST) in ranks


def test_unfinished_grid_is_ranked_by_the_seeds_common_to_all_arms() -> None:
    unfinished = [
        each.model_copy(update={"rounds": cell(accuracies=(0.1, 0.1, 0.1)).rounds})
        if each.labels == {"scenario": "noise", "selection": "flash", "seed": "0"}
        else each
        for each in results()
        if each.labels != {"scenario": "noise", "selection": "uniform", "seed": "0"}
    ]
    summary = summarise(PLAN, unfinished, missing=1)
    [last] = [
        each
        for each in ranked_readings(summary, contests_of(summary))
        if (each.measure, each.reading) == ("accuracy", LAST)
    ]
    assert last.by_cell.blocks == 3
    assert last.by_contest.means == {"flash": 1.0, "round-robin": 2.0, "uniform": 3.0}


def test_experiment_report_contains_the_contests() -> None:
    summary = summarise(PLAN, results(), missing=0)
    text = report_text(summary)
    assert text == report_text(summarise(PLAN, results(), missing=0))
    assert "## Mean ranks over 2 settings" in text
    assert "accuracy at 750 B" in text
    assert "| flash | **1.00** |" in text
    assert "-1.00 (0.1 of 0.25)" in text
    assert "p, Holm" in text


def test_mean_ranks_are_plotted() -> None:
    summary = summarise(PLAN, results(), missing=0)
    by_reading = ranked_readings(summary, contests_of(summary))[:1]
    picture = plot_ranks(by_reading)
    assert picture is not None
    assert picture.startswith(b"\x89PNG")
    assert plot_ranks([]) is None
    assert first_ranks(by_reading[0]) is by_reading[0].by_contest, "as the table above it"


def test_significant_differences_from_the_baseline_are_marked() -> None:
    """flash is about 0.2 above uniform in both seeds; round-robin in only one of them."""
    ends = {"uniform": (0.5, 0.5), "flash": (0.7, 0.701), "round-robin": (0.6, 0.7)}
    found = [
        cell(selection, scenario, seed, accuracies=(0.4, 0.5, ends[selection][seed]))
        for selection in ends
        for scenario in ("noise", "drop-outs")
        for seed in (0, 1)
    ]
    contests = contests_of(summarise(PLAN, found, missing=0))
    told = differences(contests[0], "uniform", "accuracy", LAST)
    expected = stats.ttest_rel([0.7, 0.701], [0.5, 0.5])
    assert told["flash"].test.p == pytest.approx(expected.pvalue)
    assert told["flash"].p == pytest.approx(2 * expected.pvalue), "two tests against one baseline"
    assert told["flash"].told_apart
    assert told["round-robin"].p is not None
    assert not told["round-robin"].told_apart
    assert differences(contests[0], "unknown", "accuracy", LAST) == {}
    table = difference_table(PLAN.reading, contests, "accuracy", LAST)
    assert table[0] == "| selection | noise | drop-outs | all settings |"
    assert table[2].startswith("| flash | **+0.20")
    assert "| accuracy, last |" + 3 * " 1 better, 0 worse |" in told_apart_table(
        PLAN.reading, contests
    )
    without = PLAN.model_copy(update={"reading": PLAN.reading.model_copy(update={"baseline": {}})})
    assert told_apart_table(without.reading, contests) == []
    assert difference_table(without.reading, contests, "accuracy", LAST) == []


def test_combined_contests_are_means_by_seed() -> None:
    found = [*results(), cell("uniform", "drop-outs", 2)]
    contests = contests_of(summarise(PLAN, found, missing=0))
    whole = together(contests)
    assert whole is not None
    [uniform, *_] = whole.arms
    last = [each.arms[0].readings["accuracy", LAST] for each in contests]
    assert uniform.readings["accuracy", LAST] == {
        seed: (last[0][seed] + last[1][seed]) / 2 for seed in ("0", "1")
    }
    assert together(contests[:1]) is None


def test_readings_of_partial_evaluations_are_marked() -> None:
    arms = [
        cell(selection, scenario, seed)
        for selection in ("uniform", "flash", "round-robin")
        for scenario in ("noise", "drop-outs")
        for seed in (0, 1)
    ]
    behind = CoverageSummary(clients=1, asked=4, samples=40, partial=True)
    [partial] = [
        each for each in arms if [*each.labels.values()] == ["drop-outs", "flash", "1"]
    ]  # fmt: skip
    partial.rounds[-1].coverage["accuracy"] = behind
    summary = summarise(PLAN, arms, missing=0)
    contests = contests_of(summary)
    rows = {
        (where.title, row.split(" | ")[0].strip("| ")): row.split(" | ")
        for where in contests
        for row in contest_table(summary, where)[2:]
    }
    marked = [key for key, row in rows.items() if "partial" in " ".join(row)]
    assert marked == [("scenario = drop-outs", "flash")]
    _, last, best, *others = rows["scenario = drop-outs", "flash"]
    assert last.endswith((" (partial)", " (partial)**"))
    assert "partial" not in best
    # The readings at equal bytes and at equal seconds.
    assert sum("(partial)" in each for each in others) == 2
    table = difference_table(PLAN.reading, contests, "accuracy", LAST)
    entries = {row.split(" | ")[0].strip("| "): row.split(" | ")[1:] for row in table[2:]}
    assert ["(partial)" in each for each in entries["flash"]] == [False, True, True]
    assert "partial" not in " ".join(entries["round-robin"])
    assert "`(partial)` marks" in report_text(summary)


def test_heat_map_has_a_row_for_each_arm() -> None:
    summary = summarise(PLAN, results(), missing=0)
    contests = contests_of(summary)
    pictures = heat_maps(summary, contests, ranked_readings(summary, contests))
    assert list(pictures) == ["accuracy", "worst_tenth", "picks"]
    assert all(each.startswith(b"\x89PNG") for each in pictures.values())
    shown = measure_panel(summary, contests, "accuracy", LAST)
    assert shown.columns == ["noise", "drop-outs", "all settings"]
    assert shown.texts["flash", "noise"] == "90"
    assert shown.colours["flash", "noise"] == pytest.approx(0.2 / 0.3)
    assert ("uniform", "noise") not in shown.colours
    [wrong] = leaning_panels(contests)
    assert (wrong.title, wrong.columns) == ("wrong labels", ["noise"])
    assert wrong.colours["flash", "noise"] == pytest.approx(-1.0)
    assert heat_maps(summary, [], []) == {}


def test_plot_of_many_arms_colours_only_a_few() -> None:
    names = [f"arm-{number}" for number in range(20)]
    grid = merged(GRID, {})
    grid["axes"] = {
        "scenario": {"noise": {}},
        "selection": {name: {"selector": {"name": "uniform"}} for name in names},
    }
    grid["reading"] = {"compared": "selection", "baseline": {"selection": "arm-7"}}
    plan = ExperimentFile.model_validate(grid)
    found = [cell(name, accuracies=(0.1, 0.1, 0.01 * number)) for number, name in enumerate(names)]
    arms = summarise(plan, found, missing=0).arms
    chosen = [arm.labels["selection"] for arm in in_colour(arms, plan.reading)]
    assert chosen == ["arm-7", "arm-19", "arm-18", "arm-17", "arm-1", "arm-0"]
    assert in_colour(arms[:14], plan.reading) == list(arms[:14])


def test_comparison_over_an_unknown_axis_is_refused() -> None:
    changed = merged(GRID, {"reading": {"compared": "selector"}})
    with pytest.raises(
        ConfigurationError, match=r"reading\.compared: axis 'selector' does not exist"
    ):
        validate(ExperimentFile, changed, source="contest.toml")
