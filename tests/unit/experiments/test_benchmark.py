"""The benchmark of selection: tiers, tuning, scores, result files and the leaderboard."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from potluck.common.errors import ConfigurationError, PluginError, RunError
from potluck.common.settings import plugins
from potluck.experiments.benchmark import selection_time
from potluck.experiments.benchmark.contestants import (
    data_digests,
    measured_again,
    run_arms,
    seconds_of,
)
from potluck.experiments.benchmark.leaderboard import (
    comparable,
    leaderboard,
    learned,
    profile_scores,
    ratios,
    tuning_note,
)
from potluck.experiments.benchmark.selection_time import PastRounds, profiles, server_seconds
from potluck.experiments.benchmark.standing import (
    ArmResult,
    learned_by,
    published,
    read_result,
    write_result,
)
from potluck.experiments.benchmark.tier import (
    TIERS,
    Tier,
    Trial,
    Workload,
    estimate,
    option_choices,
    read_grid,
    tier_named,
    trial_cells,
    with_grid,
)
from potluck.experiments.data_sets.prepare import known_sha256
from potluck.experiments.grid.definition import load_experiment
from potluck.experiments.grid.grid_cells import Cell
from potluck.experiments.grid.results import SAMPLES, SECONDS, CellResult, RoundResult, Timings
from potluck.server.selection import (
    Answers,
    Ask,
    RoundOutcome,
    Selection,
    SelectionContext,
    Selector,
    UpdateFact,
)
from potluck.server.selectors.oort import Oort
from potluck.server.selectors.uniform import Uniform
from potluck.server.state import State

DATA = {"mnist": "0" * 64}
OORT = Oort().exploration
SMALL = Tier.model_validate(
    {
        "name": "smoke",
        "title": "",
        "seeds": [0, 1],
        "baseline": "uniform",
        "target": 0.9,
        "server_clients": 2_000,
        "tuning": {"seeds": [9], "settings": 2, "training": {"learning_rate": [0.5]}},
        "reading": {"metric": "accuracy", "last": 1},
        "run": {
            "rounds": 4,
            "clients_per_round": 2,
            "task": {"name": "digits", "clients": 4},
            "virtual_clock": {"enabled": True, "draw": "client"},
        },
        "workloads": {
            "skew": {"start_seconds": 2, "round_seconds": 0.5},
            "noise": {
                "start_seconds": 2,
                "round_seconds": 0.5,
                "run": {"task": {"label_noise": 0.5}},
            },
            "lost": {
                "harder": "skew",
                "start_seconds": 2,
                "round_seconds": 0.5,
                "run": {"virtual_clock": {"deadline_seconds": 900.0, "drop_outs": {"a": 0.5}}},
            },
        },
        "arms": {
            "uniform": {},
            "pow-d": {"options": {"candidates": 3}, "grid": {"candidates": [4]}},
        },
    }
)


def settings(cell: Cell) -> dict[str, Any]:
    return tomllib.loads(cell.run_file)


Accuracy = Callable[[dict[str, Any]], float]


def finished(cell: Cell, accuracy: Accuracy) -> CellResult:
    """Return a result whose accuracy grows evenly; a higher seed ends a little higher."""
    last = accuracy(settings(cell)) + cell.seed / 1000
    rounds = [
        RoundResult(
            round=number, selected=["client-0", "client-1"], included=["client-0"],
            accuracy=last * number / cell.rounds, worst_group_accuracy=None, weighted_f1=None,
            loss=None, entropy=1.0, bytes_down=0, bytes_up=50, downloads=2, simulated_seconds=10.0,
        )
        for number in range(1, cell.rounds + 1)
    ]  # fmt: skip
    return CellResult(
        labels=dict(cell.labels), digest=cell.digest, run_file=cell.run_file, clients=4, hosts=1,
        rounds=rounds, model_blake3="", timings=Timings(rounds=[1.0] * len(rounds), total=4.0),
        model_bytes=100, traits={SAMPLES: [1.0, 2.0, 3.0, 4.0], SECONDS: [2.0, 3.0, 1.0, 1.0]},
        epsilon=0.0,
    )  # fmt: skip


class Runner:
    """Stand-in for a cell runner: its results follow from the cells' run files."""

    def __init__(self, accuracy: Accuracy) -> None:
        self.accuracy, self.batches = accuracy, list[list[Cell]]()
        self.purposes = list[str]()

    def __call__(self, cells: Sequence[Cell], purpose: str) -> Mapping[str, CellResult]:
        self.purposes.append(purpose)
        self.batches.append(list(cells))
        return {cell.digest: finished(cell, self.accuracy) for cell in cells}


def by_selector(run: dict[str, Any]) -> float:
    """Return an accuracy: 0.5 for uniform, 0.8 for pow-d with four candidates; 0.1 more with a
    large rate."""
    base = 0.5 if run["selector"]["name"] == "uniform" else 0.2 * run["selector"]["candidates"]
    return float(base + 0.1 * (run.get("training", {}).get("learning_rate") == 0.5))


@pytest.fixture(scope="module")
def results() -> dict[str, ArmResult]:
    runner = Runner(by_selector)
    return {each.arm: each for each in run_arms(SMALL, ["pow-d"], None, runner, data=DATA)}


# Tiers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TIERS)
def test_coordinators_accept_the_cells_of_every_tier(name: str) -> None:
    tier = tier_named(name)
    trials = [Trial(arm=tier.baseline, workload=each, choice={}) for each in tier.workloads]
    trials += [
        Trial(arm=arm, workload=tier.ranked[0], choice=choice)
        for arm in tier.arms
        for choice in option_choices(tier, arm)
    ]
    cells = [cell for of in trial_cells(tier, trials, [0]) for cell in of]
    assert len(cells) == len(trials)
    noisy = [cell for cell in cells if cell.labels["workload"] == "noisy-profiles"]
    assert [settings(cell)["profiles"]["epsilon"] for cell in noisy] == [0.2]


def test_unknown_tier_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match=r"no tier 'smok'.*did you mean 'smoke'"):
        tier_named("smok")


def test_estimate_counts_tuning_and_results_of_each_arm() -> None:
    """Results need 3 workloads × 2 seeds; tuning needs 2 ranked workloads × 2 settings × 1 seed."""
    found = estimate(SMALL, ["pow-d"], baseline=False)
    assert (found.cells, found.seconds) == (10, 10 * (2 + 4 * 0.5))
    assert estimate(SMALL, ["pow-d"], baseline=True).cells == 20
    assert estimate(SMALL, ["round-robin"], baseline=False).cells == 6  # has no options to tune


def test_smoke_tier_is_estimated_at_eight_minutes_on_two_processors() -> None:
    tier = tier_named("smoke")
    assert estimate(tier, list(tier.arms), baseline=True).seconds / 2 <= 8 * 60


def test_standard_tier_is_estimated_at_twelve_hours_on_two_processors() -> None:
    tier = tier_named("standard")
    assert estimate(tier, list(tier.arms), baseline=True).seconds / 2 <= 12 * 3600


def test_tried_settings_are_within_the_budget_and_always_the_same(tmp_path: Path) -> None:
    file = tmp_path / "grid.toml"
    file.write_text("rest = [1, 2, 3]\n")
    tier = with_grid(SMALL, "refl", file)
    tries = option_choices(tier, "refl")
    assert tries == option_choices(tier, "refl")
    assert tries[0] == {}
    assert [sorted(each) for each in tries[1:]] == [["selector.rest"]]


def test_own_value_of_an_option_is_not_tried_twice(tmp_path: Path) -> None:
    file = tmp_path / "grid.toml"
    file.write_text(f"exploration = [{OORT}, 0.7]\n")
    assert option_choices(with_grid(SMALL, "oort", file), "oort") == [
        {},
        {"selector.exploration": 0.7},
    ]


def test_deeply_nested_grid_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "grid.toml"
    file.write_text(f"z = {'[' * 3_000}")
    for read in (read_grid, partial(load_experiment, quick=False)):
        with pytest.raises(ConfigurationError, match=r"grid\.toml: not valid TOML: lists and ta"):
            read(file)


def test_invalid_grid_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "grid.toml"
    with pytest.raises(ConfigurationError, match=r"can't read .*grid\.toml: No such file"):
        read_grid(file)
    file.write_text("explored = 0.2\n")
    with pytest.raises(ConfigurationError, match="explored is not a list of values; write expl"):
        read_grid(file)
    file.write_text("explored = [0.2, 0.5]\n")
    assert read_grid(file) == {"explored": [0.2, 0.5]}


@pytest.mark.parametrize(
    ("grid", "fault"),
    [
        ("explored = [0.2]", r"grid\.toml: .*oort.* no option 'explored'"),
        ("exploration = [0.2, 0.3, 0.4, 0.5, 7]", r"grid\.toml: .*oort.*'exploration' is 7"),
    ],
)
def test_invalid_value_of_a_grid_is_refused_even_if_it_is_not_drawn(
    grid: str, fault: str, tmp_path: Path
) -> None:
    file = tmp_path / "grid.toml"
    file.write_text(grid)
    with pytest.raises(ConfigurationError, match=fault):
        with_grid(SMALL, "oort", file)
    with pytest.raises(PluginError, match=r"^potluck\.selectors: 'oorrt' is not installed"):
        with_grid(SMALL, "oorrt", file)


# Running ----------------------------------------------------------------------------------------


def test_baseline_tunes_training_and_arms_tune_their_options(results: dict[str, ArmResult]) -> None:
    uniform, other = results["uniform"], results["pow-d"]
    assert (other.grid, other.package, other.data) == ({"candidates": [4]}, None, DATA)
    assert other.tried == [{}, {"selector.candidates": 4}]
    rate = {"training.learning_rate": 0.5}
    assert uniform.training == other.training == {"skew": rate, "noise": rate, "lost": rate}
    assert other.tuned == {name: {"selector.candidates": 4} for name in SMALL.workloads}
    assert (
        uniform.targets == other.targets == pytest.approx(dict.fromkeys(SMALL.workloads, 0.54045))
    )
    assert other.values("skew") == pytest.approx({"0": 0.9, "1": 0.901})


def test_scores_count_costs_until_the_target(results: dict[str, ArmResult]) -> None:
    """Round 3 of 4, at 0.9 · 3/4, meets the target; a round costs 250 bytes, 10 s, 8
    client-seconds."""
    cost = results["pow-d"].cells_in("lost")[0].to_target
    assert cost is not None
    assert cost.model_dump() == {
        "rounds": 3,
        "bytes": 750.0,
        "seconds": 30.0,
        "client_seconds": 24.0,
    }
    assert math.isnan(results["pow-d"].values("skew", "worst_tenth")["0"])


def test_stored_baseline_is_not_run_again(results: dict[str, ArmResult]) -> None:
    runner = Runner(by_selector)
    [again] = run_arms(SMALL, ["pow-d"], results["uniform"], runner, data=DATA)
    assert again.cells == results["pow-d"].cells
    selectors = {settings(c)["selector"]["name"] for batch in runner.batches for c in batch}
    assert selectors == {"pow-d"}
    assert [len(batch) for batch in runner.batches] == [4, 6]
    assert runner.purposes == ["tuning", "results"]


def test_unknown_selector_is_refused_before_any_cell_runs() -> None:
    runner = Runner(by_selector)
    with pytest.raises(PluginError, match="'pow-e' is not installed"):
        run_arms(SMALL, ["pow-e"], None, runner, data={})
    assert runner.batches == []


def test_failed_cell_is_an_error_that_names_it() -> None:
    with pytest.raises(RunError, match="4 of 4 cells failed, the first: uniform · skew · seed 9"):
        run_arms(SMALL, [], None, lambda cells, purpose: {}, data={})


def test_other_data_than_the_baselines_are_refused_before_any_cell_runs(
    results: dict[str, ArmResult],
) -> None:
    runner = Runner(by_selector)
    with pytest.raises(ConfigurationError, match=r"your mnist; .* potluck data prepare mnist$"):
        run_arms(SMALL, ["pow-d"], results["uniform"], runner, data={"mnist": "1" * 64})
    assert runner.batches == []


def test_data_of_a_tier_have_digests_that_other_arrays_change(tmp_path: Path) -> None:
    run = {"task": {"name": "mnist", "clients": 4}}
    tier = SMALL.model_copy(update={"workloads": {"mnist": Workload.model_validate(
        {"run": run, "start_seconds": 1, "round_seconds": 1}
    )}})  # fmt: skip
    with pytest.raises(ConfigurationError, match=r"task mnist needs .*mnist\.npz"):
        data_digests(tier, tmp_path)
    found = []
    for value in (0, 0, 1):
        images, labels = np.full((2, 28, 28), value, np.uint8), np.zeros(2, np.int64)
        np.savez(
            tmp_path / "mnist.npz", x_train=images, y_train=labels, x_test=images, y_test=labels
        )
        found.append(data_digests(tier, tmp_path)["mnist"])
    assert found[0] == found[1] != found[2]
    assert data_digests(SMALL, None) == {}


# What is learnt and what it takes ---------------------------------------------------------------


def test_declarations_of_a_selector_are_listed() -> None:
    assert learned_by("uniform", [{}]) == {}
    assert learned_by("dc-balanced", [{}, {"added": 2}]) == {"profiles": ["label_counts"]}
    assert learned_by("pow-d", [{}]) == {"answers": ["loss"]}
    tuned = learned_by("clustered-sampling", [{}, {"by": "updates"}])
    assert list(tuned) == ["facts of updates"]


class ForFewClients(Uniform):
    most_clients = 500


class ForSomeClients(Uniform):
    def select(self, state: State, context: SelectionContext) -> Selection:
        found = super().select(state, context)
        return Selection(rows=found.rows[:9], reasons=found.reasons[:9])


def test_seconds_of_a_selection_are_measured_if_possible() -> None:
    measured = server_seconds(Uniform(), 2_000)
    assert measured is not None
    assert 0 < measured < 5
    assert server_seconds(ForFewClients(), 2_000) is None
    assert server_seconds(ForSomeClients(), 2_000) is None


class Learner(Uniform):
    """Keeps all outcomes, and asks its cohort for the loss after a uniform draw."""

    reports = frozenset({"utility"})
    asks_questions = frozenset({"loss"})
    needs_facts = frozenset(UpdateFact)
    sets_weights = True

    def __init__(self) -> None:
        self.outcomes = list[RoundOutcome]()
        self.observed_before_selection = list[int]()

    def select(  # type: ignore[override]  # a generator, as `Selector` permits
        self, state: State, context: SelectionContext
    ) -> Generator[Ask, Answers, Selection]:
        self.observed_before_selection.append(len(self.outcomes))
        found = super().select(state, context)
        yield Ask(rows=found.rows, kind="loss")
        return Selection(
            rows=found.rows, reasons=found.reasons, weights=np.full(len(found.rows), 2.0)
        )

    def observe(self, state: State, outcome: RoundOutcome) -> State:
        self.outcomes.append(outcome)
        return state


def test_measured_selections_follow_rounds_that_have_each_client() -> None:
    learner, population = Learner(), profiles(1_000)
    assert selection_time.measured(learner, population).selecting > 0
    outcomes = learner.outcomes
    assert [each.round for each in outcomes] == list(range(1, len(outcomes) + 1))
    large = outcomes[1:21]
    rows = np.concatenate([each.selected for each in large])
    assert sorted(rows.tolist()) == list(range(1_000))
    # one selection before the large rounds, two after them, then the measured ones
    assert learner.observed_before_selection == [0, 21, 22, 23, 24, 25, 26, 27]


def test_made_up_outcomes_have_all_that_a_selector_declares() -> None:
    learner, population = Learner(), profiles(1_000)
    selection_time.measured(learner, population)
    for outcome in (learner.outcomes[0], learner.outcomes[5]):
        size, facts = len(outcome.selected), outcome.facts
        assert set(outcome.reports) == {"loss", "utility"}
        assert ((outcome.seconds > 0) & (outcome.seconds < 60)).all()
        [answers] = outcome.answers
        assert answers.rows.tolist() == outcome.selected.tolist()
        assert list(answers.values) == ["loss"]
        assert facts is not None
        assert facts.gram.shape == (size, size)
        assert (len(facts.norms), len(facts.sketches), len(facts.output_moves)) == (size,) * 3
        assert (facts.steps >= 1).all()
    assert learner.outcomes[0].facts is not None
    assert set(learner.outcomes[0].facts.samples) == {2.0}
    assert learner.outcomes[5].facts is not None  # λ/π, with π = 1/20
    weights = population.samples / population.samples.mean() * 20
    assert learner.outcomes[5].facts.samples == pytest.approx(weights[learner.outcomes[5].selected])


@pytest.mark.parametrize(
    ("name", "array", "before"),
    [
        ("oort", "last_seen", 0),
        ("oort", "utility", math.nan),
        ("tifl", "tried", 0),
        ("fedcs", "seconds", math.nan),
        ("afl", "loss", math.nan),
        ("k-vib", "feedback", 0),
        ("delta", "chances", 1),
        ("round-robin", "selections", 0),
        ("osmd", "chances", 1),
    ],
)
def test_selector_has_learned_about_all_clients_before_it_is_measured(
    name: str, array: str, before: float
) -> None:
    past = PastRounds(plugins.create(Selector, name, {}), profiles(1_000))
    assert (np.isnan(past.state.arrays[array]) | (past.state.arrays[array] == before)).all()
    past.select(100)
    past.include_all()
    after = past.state.arrays[array]
    assert not np.isnan(after).any()
    assert (after != before).all()


def test_selector_with_inner_products_of_all_pairs_has_more_but_smaller_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(selection_time, "_MOST_PAIRS", 10)
    learner = Learner()
    past = PastRounds(learner, profiles(1_000))
    past.include_all()
    assert {len(each.selected) for each in learner.outcomes} == {10}
    assert len(learner.outcomes) == 100


@pytest.mark.parametrize("name", ["greedyfed", "fedpns", "fedentropy"])
def test_selector_that_needs_losses_or_skips_uploads_is_not_measured(name: str) -> None:
    assert server_seconds(plugins.create(Selector, name, {}), 1_000) is None


def test_selector_that_asks_for_secure_sums_is_not_measured() -> None:
    selector = plugins.create(Selector, "dc-balanced", {})
    assert server_seconds(selector, 1_000) is not None
    stepwise = selector.by_protocol()
    assert stepwise is not None
    assert server_seconds(stepwise, 1_000) is None


def test_selector_that_judges_without_losses_is_measured() -> None:
    assert server_seconds(plugins.create(Selector, "fedpns", {"check": False}), 1_000) is not None


@pytest.mark.parametrize("limit", ["LONGEST_SECONDS", "LARGEST_STATE"])
def test_selector_is_not_measured_beyond_a_limit(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert server_seconds(Oort(), 2_000) is not None
    monkeypatch.setattr(selection_time, limit, 1e-9)
    assert server_seconds(Oort(), 2_000) is None


def test_seconds_to_select_are_those_of_the_slowest_options() -> None:
    assert seconds_of("clustered-sampling", [{}], 2_000) is not None
    assert seconds_of("clustered-sampling", [{}, {"by": "updates"}], 4_000) is None


def test_second_measurement_changes_only_the_seconds(results: dict[str, ArmResult]) -> None:
    before = results["pow-d"].model_copy(update={"server_seconds": 77.0})
    after = measured_again(SMALL, before)
    assert after.server_seconds is not None
    assert after.server_seconds < 5
    assert after.model_copy(update={"server_seconds": 77.0}) == before


# Files ------------------------------------------------------------------------------------------


def test_written_result_is_read_again(results: dict[str, ArmResult], tmp_path: Path) -> None:
    path = write_result(results["pow-d"], tmp_path)
    assert path == tmp_path / "pow-d.json"
    assert read_result(path, SMALL) == results["pow-d"]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"format": 1}, "is not a result of the benchmark in format 2: format: Input should be 2"),
        ({"extra": 1}, "extra: Extra inputs are not permitted"),
        ({"rules": "0" * 64}, "results of other rules than those of tier smoke; run the arm again"),
        ({"cells": []}, "must have one cell for each workload and seed of the tier; run"),
        ({"tried": [{}, {"selector.candidates": 5}]}, "settings that are not the arm's own and"),
        (
            {"grid": {"candidates": [2]}},
            "has tried settings that are not the arm's own and up to 1",
        ),
        ({"tuned": {"skew": {"selector.candidates": 9}}}, "has tuned settings that were not tried"),
        ({"epsilon": {}}, "must have an epsilon, or null, for each workload"),
        ({"server_seconds": -1.0}, "server_seconds: Input should be greater than or equal to 0"),
    ],
)
def test_other_result_files_are_refused(
    change: dict[str, Any], fault: str, results: dict[str, ArmResult], tmp_path: Path
) -> None:
    path = write_result(results["pow-d"], tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigurationError, match=fault):
        read_result(path, SMALL)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"accuracy": 95.0}, r"cells.0.accuracy: Input should be less than or equal to 1"),
        ({"to_target": {"rounds": 0}}, r"to_target.rounds: Input should be greater than 0"),
        ({"to_target": {"bytes": -5.0}}, r"to_target.bytes: Input should be greater than 0"),
    ],
)
def test_impossible_scores_are_refused(
    change: dict[str, Any], fault: str, results: dict[str, ArmResult], tmp_path: Path
) -> None:
    path = write_result(results["pow-d"], tmp_path)
    values = json.loads(path.read_text())
    costs = {"rounds": 1, "bytes": 1.0, "seconds": 1.0, "client_seconds": 1.0}
    values["cells"][0] = values["cells"][0] | {"to_target": costs}
    for name, value in change.items():
        whole = costs | value if isinstance(value, dict) else value
        values["cells"][0][name] = whole
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigurationError, match=fault):
        read_result(path, SMALL)


def test_target_after_the_last_round_is_refused(
    results: dict[str, ArmResult], tmp_path: Path
) -> None:
    path = write_result(results["pow-d"], tmp_path)
    values = json.loads(path.read_text())
    values["cells"][0]["to_target"]["rounds"] = 99
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigurationError, match="after 99 rounds, but the run has 4; run the arm"):
        read_result(path, SMALL)


def test_result_files_with_another_name_or_too_many_settings_are_refused(
    results: dict[str, ArmResult], tmp_path: Path
) -> None:
    path = write_result(results["pow-d"], tmp_path)
    renamed = path.rename(tmp_path / "zzz.json")
    with pytest.raises(ConfigurationError, match=r"rename the file to pow-d\.json"):
        read_result(renamed, SMALL)
    many = results["pow-d"].model_copy(update={"tried": [{"a": n} for n in range(9)]})
    with pytest.raises(ConfigurationError, match="settings that are not the arm's own and"):
        read_result(write_result(many, tmp_path), SMALL)


def test_result_names_the_software_that_ran_its_cells() -> None:
    def run(cells: Sequence[Cell], purpose: str) -> Mapping[str, CellResult]:
        done = {cell.digest: finished(cell, by_selector) for cell in cells}
        return {key: each.model_copy(update={"version": "0.0.9"}) for key, each in done.items()}

    [found] = run_arms(SMALL, ["uniform"], None, run, data={})
    assert found.software == "0.0.9"


@pytest.mark.parametrize("name", TIERS)
def test_published_results_are_comparable_with_their_baseline(name: str) -> None:
    tier = tier_named(name)
    known = published(tier)
    if known:
        shown = comparable(list(known.values()), known[tier.baseline])
        assert {each.arm for each in shown} == set(known)
        assert not [each.arm for each in shown if "dirty" in each.software], "changed code"


def test_tiers_that_need_files_name_them_if_there_is_no_folder() -> None:
    assert data_digests(tier_named("smoke"), None) == {}
    with pytest.raises(ConfigurationError, match=r"needs the data sets mnist, shakespeare, but"):
        data_digests(tier_named("standard"), None)


def test_published_results_are_of_the_known_data() -> None:
    tier = tier_named("standard")
    digests = {name: known_sha256(name) for name in ("mnist", "shakespeare")}
    assert None not in digests.values()
    assert all(each.data == digests for each in published(tier).values())


# The leaderboard --------------------------------------------------------------------------------


def test_leaderboard_has_a_row_per_arm(results: dict[str, ArmResult]) -> None:
    text = leaderboard(SMALL, list(results.values()), marked="pow-d")
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in text.splitlines()[:4]]
    first = dict(zip(rows[0], rows[2], strict=True))
    assert first["arm"] == "**pow-d**"
    assert (first["mean rank"], first["accuracy"], first["minus uniform"]) == (
        "1.00",
        "0.901",
        "+0.300",
    )
    assert (first["rounds"], first["lost"], first["ε of profiles"]) == ("1.00", "–", "–")
    assert first["settings tried"] == "2"
    assert first["learns about clients"] == learned(results["pow-d"]) == "answers: loss"
    assert dict(zip(rows[0], rows[3], strict=True))["learns about clients"] == "nothing"


def test_harder_variant_and_profiles_with_noise_have_values(results: dict[str, ArmResult]) -> None:
    arm = results["pow-d"]
    cells = [
        each.model_copy(update={"accuracy": each.accuracy - 0.1} if each.workload == "lost" else {})
        for each in arm.cells
    ]
    noisy = arm.model_copy(update={"cells": cells, "epsilon": {"skew": None, "noise": 0.2}})
    rows = leaderboard(SMALL, [results["uniform"], noisy]).splitlines()
    heads, row = ([cell.strip() for cell in rows[place].split("|")] for place in (0, 2))
    shown = dict(zip(heads, row, strict=True))
    assert (shown["arm"], shown["lost"], shown["ε of profiles"]) == ("pow-d", "-0.100", "0.2")


def test_changes_in_harder_variants_have_intervals(results: dict[str, ArmResult]) -> None:
    """The changes are −0.10 and −0.12: their mean ± 12.706 · 0.01. The arm is ahead of `uniform` by
    0.3 in the easier workload, and so by 0.19 in the harder one."""
    arm = results["pow-d"]
    cells = [
        each.model_copy(
            update={"accuracy": each.accuracy - 0.1 - 0.02 * each.seed}
            if each.workload == "lost"
            else {}
        )
        for each in arm.cells
    ]
    assert {each.seed for each in cells} == {0, 1}
    rows = leaderboard(SMALL, [results["uniform"], arm.model_copy(update={"cells": cells})])
    _, differences, *_ = rows.split("Accuracy minus that of")
    assert "| arm | skew | noise | all settings | lost |" in differences
    assert "**+0.190 [+0.063, +0.317]** |\n" in differences
    _, changes = rows.split("Change of accuracy in the harder variants")
    assert "\n\n| arm | lost |\n| --- | ---: |\n| pow-d | -0.110 [-0.237, +0.017] |\n" in changes


def test_every_table_highlights_the_marked_arm(results: dict[str, ArmResult]) -> None:
    text = leaderboard(SMALL, list(results.values()), marked="pow-d")
    assert text.count("\n| **pow-d** |") == 5
    assert "\n| pow-d |" not in text


def test_table_of_tuned_arms_has_the_best_setting_by_workload(
    results: dict[str, ArmResult],
) -> None:
    best = {"skew": {"selector.candidates": 4}, "noise": {}}
    arm = results["pow-d"].model_copy(update={"tuned": best})
    text = leaderboard(SMALL, [results["uniform"], arm])
    assert "\n| pow-d | candidates = 3 | candidates = 4 in skew; its own options in noise |" in text
    assert "\n| uniform | defaults | learning_rate = 0.5 in all |" in text


def test_row_names_the_package_of_a_selector(results: dict[str, ArmResult]) -> None:
    arm = results["pow-d"].model_copy(update={"package": "my-choice-selector 0.1.0"})
    text = leaderboard(SMALL, [results["uniform"], arm], marked="pow-d")
    assert "\n| **pow-d (my-choice-selector 0.1.0)** | 1.00 |" in text


def test_tuning_note_lists_tried_and_best_settings(results: dict[str, ArmResult]) -> None:
    assert tuning_note(SMALL, results["pow-d"]) == (
        "pow-d was tuned with 2 settings: its own options; candidates = 4. "
        "Best: candidates = 4 in all."
    )
    untuned = results["pow-d"].model_copy(update={"arm": "round-robin", "tried": [{}]})
    assert tuning_note(SMALL, untuned) == "round-robin was not tuned, since it has no grid."


def test_profile_scores_fall_with_the_ratio_to_the_best_arm(results: dict[str, ArmResult]) -> None:
    """uniform needs four rounds, the best arm three: the ratio is 4/3, the score (4 − 4/3) / 3."""
    arms = list(results.values())
    assert ratios(SMALL, arms, "rounds") == {"uniform": [4 / 3] * 2, "pow-d": [1.0] * 2}
    scores = profile_scores(SMALL, arms, "rounds")
    assert scores == pytest.approx({"uniform": (4 - 4 / 3) / 3, "pow-d": 1.0})


def test_arm_that_misses_the_target_has_no_score(results: dict[str, ArmResult]) -> None:
    missed = results["pow-d"].model_copy(
        update={
            "cells": [
                each.model_copy(update={"to_target": None}) for each in results["pow-d"].cells
            ]
        }
    )
    arms = [results["uniform"], missed]
    assert profile_scores(SMALL, arms, "bytes") == {"uniform": 1.0, "pow-d": 0.0}
    assert np.isinf(ratios(SMALL, arms, "bytes")["pow-d"]).all()
    assert "| pow-d | – | – | – |" in leaderboard(SMALL, arms)


def test_results_of_another_baseline_are_not_comparable(results: dict[str, ArmResult]) -> None:
    other = results["pow-d"].model_copy(update={"targets": {}})
    assert comparable([other, results["uniform"]], results["uniform"]) == [results["uniform"]]
