"""Selectors against what their authors' programs return for recorded inputs.

Each file in `tests/testdata/authors` names a repository, a commit, and the functions that were run,
with their inputs and results. Where a program has several steps, the recorded steps begin from each
other's results. The pages in `docs/reference/selectors` list what Potluck does differently on
purpose; the tests below leave that out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.cluster.hierarchy import linkage
from scipy.spatial.distance import cdist, pdist
from support.authors import ROUNDED, cases, close
from support.populations import context, facts_of, judged, population, select

from potluck.common.learning.output_layer import label_entropies
from potluck.server.selection import Floats, MeasureMean, RoundOutcome, Rows
from potluck.server.selectors.asking.optimal_sampling import approximate
from potluck.server.selectors.fedgs import edges, farthest, overdue, shortest_paths
from potluck.server.selectors.oort import Scoring, preferred_seconds
from potluck.server.selectors.parts.inclusion import least_variance
from potluck.server.selectors.parts.loss_correlation import chosen, fitted, weighted_mean
from potluck.server.selectors.updates.clustered_sampling import (
    Distribution,
    by_similarity,
    by_size,
)
from potluck.server.selectors.updates.delta import shared
from potluck.server.selectors.updates.divfl import distances, greedy
from potluck.server.selectors.updates.fedpns import FedPNS
from potluck.server.selectors.updates.hics_fl import cut
from potluck.server.selectors.updates.k_vib import KVib
from potluck.server.selectors.updates.osmd import Osmd
from potluck.server.selectors.updates.update_memory import angles
from potluck.server.state import State


def ended(rows: Rows, norms: Floats, *, weights: Floats | None = None) -> RoundOutcome:
    """Return the outcome of a round in which all updates arrived. weights: weights of the
    updates."""
    found = replace(facts_of(np.ones((len(rows), 2)), rows=rows), norms=norms)
    if weights is not None:
        found = replace(found, samples=weights)
    return RoundOutcome(
        round=1, selected=rows, included=rows, seconds=np.ones(len(rows)), facts=found
    )


def dense(places: Sequence[Distribution], clients: int) -> Floats:
    """Return places × clients, the probability of each client in each place."""
    table = np.zeros((len(places), clients))
    for row, place in zip(table, places, strict=True):
        np.add.at(row, place.positions, place.masses)
    return table


@pytest.mark.parametrize("case", cases("osmd"))
def test_osmd_learns_as_the_program_over_four_phases(case: dict[str, Any]) -> None:
    """At the end of a phase, the program drops what it has learned in the last round."""
    selector, clients = Osmd(floor=case["floor"]), case["clients"]
    state = selector.init(population(clients))
    for step in case["rounds"]:
        mixed = (state.arrays["trust"][:, None] * state.arrays["chances"]).sum(axis=0) / clients
        drawn = least_variance(mixed, case["count"]) / case["count"]
        assert drawn == close(step["before"])
        left = state.scalars["left"]
        state = selector.observe(state, ended(step["selected"], step["norms"]))
        if left == 1:  # the next phase has begun, with what was learned
            learned = (step["trust"][:, None] * step["experts"]).sum(axis=0) * clients
            experts = len(state.arrays["trust"])
            assert state.arrays["chances"] == close(np.tile(learned, (experts, 1)))
            forgotten = np.tile(step["before"] * clients, (experts, 1))
            state = replace(state, arrays=dict(state.arrays) | {"chances": forgotten})
        else:
            assert state.arrays["trust"] == close(step["trust"])
            assert state.arrays["chances"] / clients == close(step["experts"])
    assert state.scalars["phase"] == 5


@pytest.mark.parametrize("case", cases("k-vib"))
def test_k_vib_draws_and_learns_as_the_program(case: dict[str, Any]) -> None:
    """The program takes no root of W + γ, and lets one client exceed probability 1."""
    clients, count = case["clients"], case["count"]
    selector, federation = KVib(rounds=case["rounds"]), population(clients)
    state = selector.init(federation)
    for step in case["steps"]:
        solved = np.minimum(step["solved"], 1.0)
        assert least_variance(step["importance"], count) == close(solved)
        mixed = (1 - case["uniform"]) * solved + case["uniform"] * count / clients
        given = State(
            scalars={"sum": 0.0, "number": 0}, arrays={"feedback": step["importance"] ** 2}
        )
        for seed in range(5):
            selection = select(selector, given, context(federation, count, seed=seed))
            assert selection.weights is not None
            assert 1 / selection.weights == close(mixed[selection.rows])

        sampled = step["sampled"]
        weights = 1 / np.minimum(step["mixed"][sampled], 1.0)
        state = selector.observe(state, ended(sampled, step["values"], weights=weights))
        below = sampled[step["solved"][sampled] <= 1]
        assert len(below)
        assert state.arrays["feedback"][below] == close(step["feedback"][below])
        state = replace(state, arrays={"feedback": step["feedback"]})


@pytest.mark.parametrize("case", cases("ocs"))
def test_ocs_approximates_as_the_program(case: dict[str, Any]) -> None:
    found = approximate(case["importance"], case["count"], case["steps"])
    assert found == close(case["probabilities"])


@pytest.mark.parametrize("case", cases("fedgs"))
def test_fedgs_has_the_distances_of_the_program(case: dict[str, Any]) -> None:
    found = shortest_paths(
        edges(case["labels"].astype(np.float64), case["threshold"], case["width"])
    )
    assert found == close(case["distances"])


def test_fedgs_finds_nearly_all_cohorts_of_the_exact_solver() -> None:
    found, number = 0, 0
    for case in cases("fedgs"):
        for pick in case["picks"]:
            here, count = pick["available"], case["count"]
            apart = case["alpha"] * case["distances"][np.ix_(here, here)]
            often = overdue(pick["selections"], count, len(here))[here]

            def worth(rows: Rows, apart: Floats = apart, often: Floats = often) -> float:
                pairs = apart[np.ix_(rows, rows)].sum() / (len(rows) * (len(rows) - 1))
                return float(pairs - often[rows].sum())

            best = worth(np.searchsorted(here, pick["cohort"]))
            reached = worth(farthest(apart, often, count))
            assert reached <= best + 1e-9
            found += reached > best - 1e-9
            number += 1
    assert found >= number - 1


@pytest.mark.parametrize("case", cases("delta"))
def test_delta_moves_probabilities_as_the_program(case: dict[str, Any]) -> None:
    given = replace(facts_of(case["gradients"]), steps=np.ones(len(case["rows"]), dtype=np.int64))
    before, samples = case["before"][case["rows"]], case["samples"].astype(np.float64)
    found = case["before"].copy()
    found[case["rows"]] = shared(before, samples, given, case["diversity"])
    assert found == close(case["after"])


@pytest.mark.parametrize("case", cases("fedcor"))
def test_fedcor_fits_and_selects_as_the_program(case: dict[str, Any]) -> None:
    ages = np.arange(len(case["changes"]))[::-1]
    weights = case["memory"] ** ages.astype(np.float64)
    mean = weighted_mean(case["changes"], weights)
    assert mean == close(case["mean"])
    points = fitted(
        case["points"],
        case["changes"] - mean,
        weights,
        steps=case["steps"],
        learning_rate=case["learning_rate"],
    )
    assert points == pytest.approx(case["fitted"], rel=1e-4, abs=1e-5)
    picks, _ = chosen(
        points, case["shares"], case["discounts"], case["count"], np.random.default_rng(0)
    )
    assert picks == case["picks"].tolist()


@pytest.mark.parametrize("case", cases("hics-fl"))
def test_hics_fl_measures_and_clusters_as_the_program(case: dict[str, Any]) -> None:
    """The program clusters rows of the table of distances as points; Potluck takes the distances
    themselves."""
    entropies = label_entropies(case["moves"], case["temperature"])
    assert entropies == close(case["entropies"])
    apart = angles(case["moves"])
    apart += case["entropy_weight"] * np.abs(entropies[:, None] - entropies)
    assert apart == pytest.approx(case["distances"], rel=ROUNDED, abs=1e-7)
    labels = cut(linkage(pdist(case["distances"]), "ward"), case["clusters"])
    together = labels[:, None] == labels
    assert (together == (case["labels"][:, None] == case["labels"])).all()


@pytest.mark.parametrize("case", cases("oort"))
def test_oort_draws_by_the_scores_of_the_program(case: dict[str, Any]) -> None:
    """Without a limit on utilities: the program divides by their range before they are limited."""
    scoring = Scoring(penalty=case["penalty"], clip=1.0)
    scores = scoring.scores(case["utilities"], case["last_seen"], round_number=case["round"])
    scores = scores * scoring.speed(
        case["seconds"], preferred_seconds(case["seconds"], case["percentile"])
    )
    assert scores / scores.sum() == close(case["shares"])


@pytest.mark.parametrize("case", cases("divfl"))
def test_divfl_selects_as_the_program(case: dict[str, Any]) -> None:
    apart = distances(case["vectors"])
    everyone = np.arange(len(apart))
    rows, _ = greedy(apart, everyone, case["count"], np.random.default_rng(0))
    reached = apart[:, rows].min(axis=1).sum()
    for theirs in (case["greedy"], case["lazy"]):
        # two clients that are each other's nearest are equally good, so the sets may differ
        assert reached == pytest.approx(apart[:, theirs].min(axis=1).sum())


@pytest.mark.parametrize("case", cases("clustered-sampling"))
def test_clustered_sampling_has_the_places_of_the_program(case: dict[str, Any]) -> None:
    """By updates, the program clusters rows of the table of angles as points. It and Potluck pour
    the small clusters in different orders, so only the clusters that open a place are equal."""
    clients, count = len(case["samples"]), case["count"]
    masses = count * case["samples"] / case["samples"].sum()
    assert dense(by_size(masses, count), clients) == pytest.approx(case["by_size"], abs=1e-8)

    assert angles(case["vectors"]) == pytest.approx(case["distances"], abs=1e-7)
    points = case["distances"]
    places = by_similarity(cdist(points, points).astype(np.float64), masses, count)
    assert dense(places, clients).sum(axis=0) == close(masses)
    assert case["by_updates"].sum(axis=0) == pytest.approx(masses, abs=1e-8)
    groups = [np.flatnonzero(case["clusters"] == each) for each in np.unique(case["clusters"])]
    largest = sorted(groups, key=lambda group: -float(masses[group].sum()))[:count]
    for group, place in zip(largest, places, strict=True):
        assert set(group.tolist()) <= set(place.positions.tolist())
        assert any((table[group] > 0).all() for table in case["by_updates"])


@pytest.mark.parametrize("case", cases("fedpns"))
def test_fedpns_flags_keeps_and_moves_as_the_program(case: dict[str, Any]) -> None:
    selector, rows = FedPNS(), case["rows"]
    one_less = case["selected"].copy()
    one_less[rows] -= 1  # the program has counted this round already
    state = State(
        arrays={
            "probability": case["before"],
            "selected": one_less,
            "flagged": case["flagged"],
        }
    )
    given = replace(
        facts_of(case["gradients"], rows=rows), steps=np.ones(len(rows), dtype=np.int64)
    )
    losses = iter(case["losses"].ravel().tolist())

    def measured(wanted: MeasureMean) -> float:
        return float(next(losses))

    judgement = judged(selector, state, given, measured)
    kept = [row for row in rows.tolist() if row not in judgement.set_aside]
    assert kept == case["kept"].tolist()
    assert sorted(rows[judgement.values["flagged"] > 0].tolist()) == sorted(case["labeled"])
    after = selector.observe(
        state,
        RoundOutcome(
            round=1,
            selected=rows,
            included=np.array(kept),
            seconds=np.ones(len(rows)),
            facts=given,
            judgement=judgement,
        ),
    )
    assert after.arrays["probability"] == close(case["after"])
