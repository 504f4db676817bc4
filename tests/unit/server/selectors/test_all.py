"""Properties of every selector, for any profiles and any arrivals and departures."""

import functools
import itertools
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save
from support.populations import (
    CLASSES,
    QUESTIONS,
    Respond,
    context,
    facts,
    judged,
    outcome,
    played,
    population,
    rounds,
    select,
)

from potluck.common.errors import PluginError
from potluck.common.learning.heterogeneity import triplets
from potluck.common.settings.plugins import create
from potluck.server.eligibility.host_cover import on_enough_hosts
from potluck.server.selection import (
    SKETCH_SIZE,
    Answers,
    Ask,
    Floats,
    Judgement,
    MeasureMean,
    Population,
    RoundOutcome,
    Rows,
    Selection,
    Selector,
    UpdateFacts,
)
from potluck.server.state import State

NAMES = (
    "afl",
    "clustered-sampling",
    "dc-balanced",
    "dc-exhaustive",
    "dc-random",
    "dc-real",
    "delta",
    "divfl",
    "everyone",
    "fed-cbs",
    "fedcor",
    "fedcs",
    "feddiverse",
    "fedentopt",
    "fedlecc",
    "fedentropy",
    "feel",
    "fedgs",
    "fedpns",
    "greedyfed",
    "hics-fl",
    "flash",
    "flips",
    "hcsfed",
    "k-vib",
    "kl",
    "known-matrix",
    "neural-bandit",
    "ocs",
    "oort",
    "osmd",
    "pow-d",
    "pyramidfl",
    "refl",
    "restless-bandit",
    "round-robin",
    "tifl",
    "uniform",
)

OPTIONS: dict[str, tuple[str, dict[str, object]]] = {
    "dc-exhaustive": ("dc-exhaustive", {"added": 2}),
    "tifl-often": ("tifl", {"tiers": 3, "interval": 2}),
    "clustered-sampling-by-updates": ("clustered-sampling", {"by": "updates"}),
    "fedcor": ("fedcor", {"warm_up": 1, "refresh": 2, "steps": 20}),
    "greedyfed": ("greedyfed", {"permutations": 20}),
    "fedpns-checked": ("fedpns", {"check": True}),
    "k-vib-by-samples": ("k-vib", {"weights": "samples"}),
    "hics-fl-told": ("hics-fl", {"entropies": "told"}),
    "ocs-of-few": ("ocs", {"candidates": 1, "weights": "samples"}),
    "osmd-by-samples": ("osmd", {"weights": "samples"}),
    "pyramidfl-with-both": ("pyramidfl", {"prolong": True, "drop": True}),
}
"""Selector and options, by test name, for the tests of selectors with options."""

every = pytest.mark.parametrize("name", sorted({*NAMES, *OPTIONS}))


def selector_called(name: str) -> Selector:
    return create(Selector, *OPTIONS.get(name, (name, {})))


def through_the_store(state: State) -> State:
    """Return the state as read after a kill: scalars from JSON, arrays from a file."""
    scalars = json.loads(json.dumps(dict(state.scalars)))
    return State(scalars=scalars, arrays=load(save(dict(state.arrays))))


@st.composite
def federations(draw: st.DrawFn) -> Population:
    """Draw 1 to 14 clients that disclosed nothing, only zeros, different values or all the same."""
    clients = draw(st.integers(1, 14))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    matrices = generator.integers(0, 30, (clients, 3, 2)).astype(np.float64)
    if draw(st.booleans()):
        matrices[:] = matrices[0]
    if draw(st.booleans()):
        matrices[generator.random(clients) < 0.3] = 0
    found = triplets(matrices)
    counts = matrices.sum(axis=2)
    if draw(st.booleans()):
        counts += generator.integers(-20, 20, counts.shape)  # noise
    if draw(st.booleans()):
        silent = generator.random(clients) < 0.4
        for column in (matrices, found, counts):
            column[silent] = np.nan
    return population(
        clients, classes=3, label_counts=counts, triplet_rows=found, matrices=matrices
    )


SPECIAL = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e308, -1.0, 5e-324])


@st.composite
def anything(draw: st.DrawFn, length: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Draw any values of a double, as clients may send; by a seed, since there are many."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    kinds = [
        generator.choice(SPECIAL, length),
        generator.uniform(0, 10, length),
        generator.choice([-1.0, 1.0], length) * 10 ** generator.uniform(-308, 308, length),
    ]
    chosen: np.ndarray[tuple[int], np.dtype[np.float64]] = np.choose(
        generator.integers(0, len(kinds), length), kinds
    )
    return chosen


def answer_anything(data: st.DataObject, ask: Ask) -> Answers:
    """Answer for some of the clients, with any doubles, sometimes without one of the values."""
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    rows = ask.rows[generator.random(len(ask.rows)) < data.draw(st.sampled_from([0, 0.7, 1]))]
    names = [name for name in QUESTIONS[ask.kind] if data.draw(st.integers(0, 9))]
    return Answers(rows=rows, values={name: data.draw(anything(len(rows))) for name in names})


def any_facts(rows: Rows, number: int, data: st.DataObject) -> UpdateFacts:
    """Return plausible facts of updates, or facts of any doubles, even infinite ones."""
    count = len(rows)
    sound = facts(rows, number)
    if data.draw(st.booleans()):
        return sound

    def drawn(columns: int) -> Floats:
        numbers = data.draw(anything(count * columns))
        return numbers.reshape(count, columns)

    return replace(
        sound,
        gram=drawn(count),
        sketches=np.tile(drawn(1), SKETCH_SIZE),
        output_moves=drawn(CLASSES),
        norms=drawn(1)[:, 0],
    )


def next_of(losses: Iterator[float], _: MeasureMean) -> float:
    """Return the next loss as a measurement does, with infinity for NaN."""
    loss = next(losses)
    return loss if math.isfinite(loss) else math.inf


def replayed(answers: Sequence[Answers]) -> Respond:
    """Return the same answers again, as a selection repeated after a kill gets them."""
    left = iter(answers)
    return lambda _: next(left)


@every
@settings(max_examples=25, deadline=None)
@given(federation=federations(), count=st.integers(0, 16), data=st.data())
def test_every_selector_selects_complete_cohorts_of_distinct_available_clients(
    name: str, federation: Population, count: int, data: st.DataObject
) -> None:
    """This holds in every round, for any disconnected clients, any failures in the cohort, any
    clients that over-selection made unnecessary, and any answers and reports."""
    selector = selector_called(name)
    state = selector.init(federation)
    for number in range(1, 5):
        present = data.draw(st.sets(st.integers(0, len(federation) - 1)))
        available = np.array(sorted(present), dtype=np.int64)
        given_context = context(federation, count, number=number, available=available)
        selection, answers = played(
            selector, state, given_context, lambda ask: answer_anything(data, ask)
        )
        rows = selection.rows.tolist()
        assert len(rows) == len(set(rows)) == min(count, len(present))
        assert set(rows) <= present
        assert len(selection.reasons) == len(rows)
        assert all(selection.reasons)
        again = select(selector_called(name), state, given_context, replayed(answers))
        assert again.rows.tolist() == rows
        needed = selection.rows[: data.draw(st.integers(0, len(rows)))]
        came = needed[: data.draw(st.integers(0, len(needed)))]
        found = any_facts(came, number, data)
        judgement = Judgement()
        if len(came):
            losses = itertools.cycle(data.draw(anything(97)).tolist())
            judgement = judged(selector, state, found, functools.partial(next_of, losses))
        aside = list(judgement.set_aside)
        assert set(aside) < set(came.tolist()) or not aside
        assert all(judgement.set_aside.values())
        ended = RoundOutcome(
            round=number,
            selected=needed,
            cohort=selection.rows,
            included=came[~np.isin(came, aside)],
            facts=found,
            judgement=judgement,
            seconds=data.draw(anything(len(needed))),
            reports={"utility": data.draw(anything(len(needed)))} if number > 1 else {},
            answers=answers,
            deadline_seconds=data.draw(st.sampled_from([np.inf, 600.0])),
        )
        state = selector.observe(state, ended)
        json.dumps(dict(state.scalars), allow_nan=False)


@every
@settings(max_examples=10, deadline=None)
@given(federation=federations(), count=st.integers(1, 16), data=st.data())
def test_every_selector_continues_after_cohorts_are_completed_to_enough_hosts(
    name: str, federation: Population, count: int, data: st.DataObject
) -> None:
    selector, clients = selector_called(name), len(federation)
    state = selector.init(federation)
    hosts = data.draw(st.lists(st.sampled_from("abcd"), min_size=clients, max_size=clients))
    for number in range(1, 5):
        present = data.draw(st.sets(st.integers(0, clients - 1), min_size=1))
        least = data.draw(st.integers(1, min(count, len({hosts[row] for row in present}))))
        given_context = context(
            federation, count, number=number, available=np.array(sorted(present), dtype=np.int64)
        )
        selection, answers = played(selector, state, given_context)
        completed = [
            on_enough_hosts(
                selection.rows,
                given_context.available,
                hosts=hosts,
                least=least,
                count=count,
                limits=[],
                draw=given_context.generator("hosts"),
            )
            for _ in range(2)
        ]
        assert completed[0] is not None
        assert completed[1] is not None
        rows = completed[0].tolist()
        assert completed[1].tolist() == rows
        assert len(rows) == len(set(rows)) == len(selection.rows)
        assert set(rows) <= present
        assert len({hosts[row] for row in rows}) >= least
        if len({hosts[row] for row in selection.rows}) >= least:
            assert completed[0] is selection.rows
        selection = replace(selection, rows=completed[0])
        found = facts(selection.rows, number)
        judgement = judged(selector, state, found)
        utility = np.ones(len(rows))
        ended = outcome(number, selection, answers, judgement=judgement, utility=utility)
        # An outcome as in masked rounds: the coordinator learns nothing of a single update.
        masked = replace(ended, facts=None, judgement=Judgement(), reports={})
        hidden = selector.needs_facts or selector.reports or selector.measures
        state = selector.observe(state, ended if hidden else masked)
        json.dumps(dict(state.scalars), allow_nan=False)


def large(clients: int = 40) -> Population:
    generator = np.random.default_rng(5)
    matrices = generator.integers(0, 30, (clients, 3, 2)).astype(np.float64)
    return population(
        clients,
        classes=3,
        label_counts=matrices.sum(axis=2),
        triplet_rows=triplets(matrices),
        matrices=matrices,
    )


def listed(selections: list[Selection]) -> list[tuple[list[int], list[str]]]:
    return [(s.rows.tolist(), list(s.reasons)) for s in selections]


@every
def test_selectors_select_the_same_clients_after_a_restart_in_any_round(name: str) -> None:
    straight = list(rounds(selector_called(name), large(), 7, 12))
    killed = list(rounds(selector_called(name), large(), 7, 12, store=through_the_store))
    assert listed(killed) == listed(straight)


@every
def test_selections_depend_only_on_the_seed(name: str) -> None:
    def cohorts(seed: int) -> list[tuple[list[int], list[str]]]:
        return listed(list(rounds(selector_called(name), large(), 7, 6, seed=seed)))

    assert cohorts(1) == cohorts(1)
    if name not in ("kl", "everyone"):  # these two ignore the seed
        assert cohorts(1) != cohorts(2)


@every
def test_clients_that_join_later_can_be_selected(name: str) -> None:
    selector, small, grown = selector_called(name), large(5), large(12)
    state = selector.init(small)
    for number, federation in ((1, small), (2, grown), (3, grown)):
        selection, answers = played(selector, state, context(federation, 12, number=number))
        assert sorted(selection.rows.tolist()) == list(range(len(federation)))
        ended = outcome(number, selection, answers, samples=grown.samples)  # joined during round 1
        state = through_the_store(selector.observe(state, ended))


BY_PROFILE = {"dc-real", "everyone", "kl", "neural-bandit"}
"""Selectors that may select a client in nearly every round, whatever becomes of its updates."""


@pytest.mark.parametrize("name", sorted({*NAMES, *OPTIONS} - BY_PROFILE))
def test_a_client_that_is_always_too_slow_is_not_selected_in_every_round(name: str) -> None:
    """Over-selection makes client 0 unnecessary in each round. A selector that counted it as not
    selected would give one of its places to this client for ever."""
    selector, federation, times = selector_called(name), large(15), 0
    state = selector.init(federation)
    for number in range(1, 61):
        given = replace(context(federation, 5, number=number, seed=3), spares=1, rounds=60)
        selection, answers = played(selector, state, given)
        rows = selection.rows
        slow = rows == 0
        times += number > 30 and slow.any()
        needed = rows[~slow] if slow.any() else rows[:-1]
        found = facts(needed, number)
        ended = RoundOutcome(
            round=number,
            selected=needed,
            cohort=rows,
            included=needed,
            seconds=needed + 1.0,
            answers=answers,
            deadline_seconds=100.0,
            facts=found,
            judgement=judged(selector, state, found),
            reports={"utility": np.ones(len(needed)), "loss": np.ones(len(needed))},
            samples=np.full(15, 5),
        )
        state = selector.observe(state, ended)
    assert times <= 20


@every
def test_selectors_do_not_modify_their_arguments(name: str) -> None:
    federation, selector = large(), selector_called(name)
    columns = (federation.label_counts, federation.triplets, federation.interaction_matrices)
    for column in columns:
        assert column is not None
        column.flags.writeable = False
    state = selector.init(federation)
    for array in state.arrays.values():
        array.flags.writeable = False
    selection, answers = played(selector, state, context(federation, 7))
    for answer in answers:
        answer.rows.flags.writeable = False
        for values in answer.values.values():
            values.flags.writeable = False
    given = facts(selection.rows)
    for array in (given.gram, given.sketches, given.output_moves):
        array.flags.writeable = False
    judgement = judged(selector, state, given)
    selector.observe(state, outcome(1, selection, answers, judgement=judgement, utility=np.ones(7)))


@every
def test_error_about_an_unknown_selector_option_lists_the_valid_ones(name: str) -> None:
    with pytest.raises(PluginError, match="its options: "):
        create(Selector, OPTIONS.get(name, (name, {}))[0], {"colour": "green"})


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("clustered-sampling", {"by": "updates"}),
        ("fedcor", {}),
        ("fedlecc", {}),
        ("feel", {}),
        ("hics-fl", {}),
    ],
)
def test_selector_without_its_library_is_refused_when_created(
    name: str, options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(PluginError, match=rf"{name}: scipy .* pip install '\.\[server\]'"):
        create(Selector, name, options)
    create(Selector, "clustered-sampling", {"by": "size"})  # clusters by size need no scipy
