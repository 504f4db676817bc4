"""HiCS-FL: the entropy, the clusters, and the clients it prefers early and late."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from support.populations import context, facts_of, outcome, played, population, select

from potluck.common.errors import ConfigurationError
from potluck.common.learning.output_layer import label_entropies
from potluck.server.selection import Answers, Ask, Selection
from potluck.server.selectors.updates.hics_fl import HiCSFL, cut
from potluck.server.selectors.updates.update_memory import angles, ward
from potluck.server.state import State


def test_label_entropy_is_estimated_from_the_change_of_the_output_bias() -> None:
    moves = 0.0025 * np.array([[1.0, 0, -1], [0, 0, 0], [1e9, 0, 0]])
    assert label_entropies(moves, 0.0025) == pytest.approx([0.83240, np.log(3), 0], abs=5e-6)


def test_ward_tree_is_cut_into_the_requested_number_of_clusters() -> None:
    points = np.array([0.0, 0.1, 5, 5.1, 9, 0.05])
    labels = cut(ward(np.abs(points[:, None] - points)), 3)
    assert labels[0] == labels[1] == labels[5]
    assert labels[2] == labels[3]
    assert len(set(labels.tolist())) == 3
    assert cut(ward(np.abs(points[:, None] - points)), 6).tolist() == list(range(6))


def test_angle_to_a_zero_vector_is_0() -> None:
    found = angles(np.array([[1.0, 0], [0, 2], [-3, 0], [0, 0]]))
    assert found[0] == pytest.approx([0, np.pi / 2, np.pi, 0])
    assert found[3].tolist() == [0, 0, 0, 0]


EVEN, SKEWED = [0.01, 0.0, 0.0], [0.35, 0.0, -0.3]


def learned(selector: HiCSFL, moves: np.ndarray) -> State:
    rows = np.arange(len(moves))
    everybody = Selection(rows=rows, reasons=["x"] * len(rows))
    ended = dataclasses.replace(outcome(1, everybody), facts=facts_of(moves, rows=rows))
    return selector.observe(selector.init(population(len(rows))), ended)


def share_of_even(selector: HiCSFL, number: int) -> float:
    generator = np.random.default_rng(2)
    moves = np.array([EVEN] * 10 + [SKEWED] * 10) * generator.uniform(0.9, 1.1, (20, 1))
    state, even = learned(selector, moves), 0
    for seed in range(100):
        given = context(population(20), 4, number=number, seed=seed)
        rows = select(selector, state, dataclasses.replace(given, rounds=50)).rows
        even += int((rows < 10).sum())
    return even / 400


def test_hics_fl_prefers_clients_with_even_labels_early_in_a_run() -> None:
    selector = HiCSFL(temperature=0.25, spread=10, clusters=2)
    early, late = share_of_even(selector, 2), share_of_even(selector, 50)
    assert early > 0.75
    assert late == pytest.approx(0.5, abs=0.1)


def test_hics_fl_draws_by_similarity_if_label_entropies_vary_much() -> None:
    selector = HiCSFL(temperature=0.0025)
    state = learned(selector, np.array([[1.0, 0, 0], [0, 1.0, 0], [0, 0, 1.0], [0, 0, 0]] * 3))
    chosen = select(selector, state, context(population(12), 4, number=5))
    assert all(reason.startswith("drawn for place") for reason in chosen.reasons)


def test_hics_fl_refuses_more_than_3000_clients() -> None:
    federation = population(3001)
    with pytest.raises(ConfigurationError, match=r"hics-fl compares all clients .* up to 3,000"):
        select(HiCSFL(), HiCSFL().init(federation), context(federation, 3))


def test_reported_label_entropies_are_requested_once_and_replace_estimates() -> None:
    """Ten clients with even labels are preferred early, as with estimates from updates."""
    selector = HiCSFL(entropies="told", spread=9.0)
    assert (selector.needs_facts, selector.asks_questions) == (
        frozenset(),
        frozenset({"label-entropy"}),
    )
    told = np.append(np.full(10, 1.0), np.full(10, 0.2))
    told[19] = np.nan
    asked: list[list[int]] = []

    def answering(ask: Ask) -> Answers:
        assert (ask.kind, ask.trains) == ("label-entropy", True)
        assert ask.parameters == {"temperature": 0.0025}
        asked.append(ask.rows.tolist())
        rows = ask.rows[~np.isnan(told[ask.rows])]
        return Answers(rows=rows, values={"label-entropy": told[rows]})

    federation = population(20)
    state = selector.init(federation)
    even = []
    for number in range(1, 41):
        given = dataclasses.replace(context(federation, 4, number=number), rounds=40)
        selection, answers = played(selector, state, given, answering)
        even.append(float((selection.rows < 10).mean()))
        state = selector.observe(state, dataclasses.replace(outcome(number, selection, answers)))
    assert asked[0] == list(range(20))
    assert asked[1:] == [[19]] * 39, "who has not told is asked again"
    assert np.mean(even[:10]) > 0.7 > np.mean(even[-10:])


def test_hics_fl_draws_by_samples_if_reported_entropies_differ() -> None:
    selector = HiCSFL(entropies="told", spread=0.0)
    samples = np.array([1000, 1, 1, 1, 1])
    federation = dataclasses.replace(population(5), samples=samples)
    selection = select(selector, selector.init(federation), context(federation, 2))
    assert 0 in selection.rows
    assert all("drawn for place" in reason for reason in selection.reasons[:1])
