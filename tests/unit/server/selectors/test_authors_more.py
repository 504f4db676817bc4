"""More selectors against what their authors' programs return, as in `test_authors.py`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.authors import cases, close
from support.populations import context, facts_of, population, select

from potluck.client.base.availability_plan import AvailabilityPlan
from potluck.common.tensors.encoding import EncodedUpdate
from potluck.common.tensors.layout import Layout
from potluck.common.tensors.tensor_files import NamedTensors
from potluck.server.reduce.late_updates import (
    RebasedUpdate,
    deviations_from_mean,
    shares_of_largest,
    staleness_weight,
)
from potluck.server.selection import Answers, Ask, Floats, Judgement, Offers, RoundOutcome, Rows
from potluck.server.selectors.asking.refl import Refl, next_mean, stragglers_expected
from potluck.server.selectors.oort import preferred_seconds
from potluck.server.selectors.pyramidfl import (
    PyramidFL,
    dropped_shares,
    gradient_utilities,
    passes,
    round_seconds,
)
from potluck.server.selectors.sparing.fedentropy import FedEntropy
from potluck.server.selectors.updates.greedyfed import Coalition, GreedyFed, shapley_values
from potluck.server.state import State

# REFL ---------------------------------------------------------------------------------------------


def model_of(numbers: Floats) -> NamedTensors:
    """Return a model with a matrix and a vector."""
    split: dict[str, NDArray[np.generic]] = {
        "body.weight": numbers[:4].reshape(2, 2).astype(np.float32),
        "head.bias": numbers[4:].astype(np.float32),
    }
    return NamedTensors(layout=Layout.of(split), arrays=split)


@pytest.mark.parametrize("case", cases("refl"))
def test_late_updates_have_the_weights_of_refls_program(case: dict[str, Any]) -> None:
    nothing = model_of(np.zeros(6))
    fresh, late = (
        [EncodedUpdate(each, each.layout) for each in map(model_of, case[name])]
        for name in ("fresh", "late")
    )
    rebased = [RebasedUpdate(each, nothing, nothing) for each in late]
    shares = shares_of_largest(deviations_from_mean(fresh, rebased, nothing, ()))
    weights = [
        staleness_weight(age, share, beta=case["beta"], divisor=case["divisor"])
        for age, share in zip(case["rounds_late"].tolist(), shares.tolist(), strict=True)
    ]
    assert weights == close(case["weights"])


@pytest.mark.parametrize("case", cases("refl"))
def test_refl_averages_durations_and_expects_late_updates_as_the_program(
    case: dict[str, Any],
) -> None:
    """The program's average starts from a deadline that its user sets; here both start from the
    first round's duration."""
    means = [float(case["durations"][0])]
    for seconds in case["durations"][1:].tolist():
        means.append(next_mean(means[-1], seconds, case["memory"]))
    assert means == close(case["means"])

    clients, elapsed = len(case["left"]), 7.0
    state = State(scalars={"clock": elapsed, "mean_seconds": means[-1]})
    arrays = {"begun": np.zeros(clients), "seconds": case["left"] + elapsed}
    assert stragglers_expected(state, arrays, np.arange(clients)) == case["expected"]


def time_of_day(seconds: int) -> str:
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}"


@pytest.mark.parametrize("case", cases("refl"))
def test_refl_puts_the_clients_first_that_the_program_does(case: dict[str, Any]) -> None:
    """The program puts only those clients first that are available for all of the next μ seconds,
    and it selects the other clients at random."""
    begin, end = case["now"] + case["window"], case["now"] + 2 * case["window"]
    chances = np.array(
        [
            AvailabilityPlan(hours=(f"{time_of_day(first)}-{time_of_day(last)}",)).forecast(
                "k0", begin, end
            )
            for first, last in case["periods"].tolist()
        ]
    )
    assert ((chances == 1) == case["later"]).all()

    def respond(ask: Ask) -> Answers:
        return Answers(rows=ask.rows, values={"availability": chances[ask.rows]})

    stays = case["available"][case["sooner"][case["available"]]]
    federation, count = population(len(chances)), len(case["first"])
    given = context(federation, count, available=stays)
    chosen = select(Refl(), Refl().init(federation), given, respond)
    assert sorted(chosen.rows.tolist()) == case["first"].tolist()


# PyramidFL ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", cases("pyramidfl"))
def test_pyramidfl_sets_passes_and_omitted_shares_as_the_program(case: dict[str, Any]) -> None:
    """The program divides the range of shares by the number of clients, so that the smallest update
    omits one step less than the largest share."""
    rows, epochs, count = case["rows"], case["epochs"], case["count"]
    if case["dropped"].any():
        most = case["most"] - (case["most"] - case["least"]) / count
        shares = dropped_shares(case["gradients"][rows], case["least"], most)
        if len(set(case["gradients"][rows].tolist())) == count:
            assert shares.max() == close(most)
        assert shares == close(case["dropped"])
    seconds = case["computing"] + case["sending"]
    if not case["dropped"].any():
        assert round_seconds(seconds, count) == close(case["round_seconds"])
    computing = case["computing"][rows]
    lasting = computing + (1 - case["dropped"]) * case["sending"][rows]
    found = passes(lasting, computing, case["round_seconds"], epochs, longest=10.0)
    assert found == close(case["factors"] * epochs)


@pytest.mark.parametrize("case", cases("pyramidfl"))
def test_pyramidfl_has_the_gradient_utilities_of_the_program(case: dict[str, Any]) -> None:
    """The program subtracts the model from an update that is a difference already."""
    samples = np.minimum(case["sizes"], case["trained"]).astype(np.float64)
    found = gradient_utilities(replace(facts_of(case["deltas"]), samples=samples))
    assert found == close(case["utilities"])
    less = replace(facts_of(case["deltas"] - case["model"]), samples=samples)
    assert gradient_utilities(less) == close(case["utilities_with_model"])


@pytest.mark.parametrize("case", [each["scores"] for each in cases("pyramidfl")])
def test_pyramidfl_draws_by_the_scores_of_the_program(case: dict[str, Any]) -> None:
    """Without a limit on utilities, as in the test of Oort. If the percentile is the duration of a
    client, the program takes the next larger duration."""
    scoring = PyramidFL(penalty=case["penalty"], clip=1.0)._scoring
    scores = scoring.scores(case["utilities"], case["last_seen"], round_number=case["round"])
    scores = scores * scoring.speed(
        case["seconds"], preferred_seconds(case["seconds"], case["percentile"] + 1e-9)
    )
    assert scores / scores.sum() == close(case["shares"])


# GreedyFed ----------------------------------------------------------------------------------------


class Recorded:
    """A generator that returns the recorded permutations, one after the other."""

    def __init__(self, orders: list[list[int]]) -> None:
        self.left: Iterator[list[int]] = iter(orders)

    def permutation(self, players: list[int]) -> NDArray[np.int64]:
        order = next(self.left)
        assert sorted(order) == sorted(players)
        return np.array(order)


def valued(case: dict[str, Any], orders: list[list[int]], *, tolerance: float) -> Floats:
    """Return the Shapley values of a case's updates, computed with these permutations."""

    def worth(players: Coalition) -> float:
        rows = list(players)
        model = case["start"]
        if rows:
            model = np.average(case["updates"][rows], axis=0, weights=case["samples"][rows])
        return -float(((model - case["target"]) ** 2).sum())

    generator: Any = Recorded(orders)
    reckoning = shapley_values(
        len(case["updates"]), generator, tolerance=tolerance, permutations=len(orders)
    )
    coalition = next(reckoning)
    while True:
        try:
            coalition = reckoning.send(worth(coalition))
        except StopIteration as ended:
            values: Floats = ended.value
            return values


def all_orders(players: int) -> list[list[int]]:
    """Return orders such that each player comes first in as many of them as any other, followed by
    the other players in every order."""
    others = [
        list(itertools.permutations([each for each in range(players) if each != leader]))
        for leader in range(players)
    ]
    return [list(order) for orders in zip(*others, strict=True) for order in orders]


@pytest.mark.parametrize("case", cases("greedyfed"))
def test_greedyfed_has_the_values_of_the_program_after_its_permutations(
    case: dict[str, Any],
) -> None:
    """The program ends after the first 19 permutations, rounded up to a multiple of the updates. If
    a round hardly changes the loss, its values are 1e-9 and Potluck's are 0."""
    players = len(case["updates"])
    assert len(case["orders"]) in (0, -(-19 // players) * players)
    values = valued(case, case["orders"].tolist(), tolerance=1e-4)
    assert values == pytest.approx(case["values"], rel=1e-6, abs=1e-8)
    if len(case["exact"]) and len(case["orders"]):
        exact = valued(case, all_orders(players), tolerance=0.0)
        assert exact == close(case["exact"])


@pytest.mark.parametrize("case", cases("greedyfed")[0]["runs"])
def test_greedyfed_averages_values_and_selects_as_the_program(case: dict[str, Any]) -> None:
    """The program trains all clients once in their order, Potluck in a random one."""
    clients, selector = case["clients"], GreedyFed()
    federation, count = population(clients), len(case["rounds"][0]["cohort"])
    state, compared = selector.init(federation), 0
    for index, step in enumerate(case["rounds"]):
        rows: Rows = step["cohort"]
        if index > clients // count:
            given = context(federation, count, number=index + 1)
            assert sorted(select(selector, state, given).rows.tolist()) == rows.tolist()
            compared += 1
        ended = RoundOutcome(
            round=index + 1,
            selected=rows,
            included=rows,
            seconds=np.ones(count),
            facts=facts_of(np.ones((count, 2)), rows=rows),
            judgement=Judgement(values={"shapley": step["values"]}),
        )
        state = selector.observe(state, ended)
        means = state.arrays["value"] / np.maximum(state.arrays["rounds"], 1)
        assert means == close(step["means"])
    assert compared >= 4


# FedEntropy ---------------------------------------------------------------------------------------


def skipped_in(selector: FedEntropy, state: State, step: dict[str, Any], samples: Rows) -> Rows:
    """Return the clients that skip their upload in a recorded round."""
    labels = {f"class-{each}": column for each, column in enumerate(step["labels"].T)}
    rows: Rows = step["cohort"]
    return selector.spare(state, Offers(rows=rows, values=labels, samples=samples[rows])).rows


def ended_without(number: int, rows: Rows, skipped: Rows) -> RoundOutcome:
    """Return the outcome of a round in which these clients skipped their upload."""
    return RoundOutcome(
        round=number,
        selected=rows,
        included=rows[~np.isin(rows, skipped)],
        spared=skipped,
        seconds=np.ones(len(rows)),
    )


@pytest.mark.parametrize("case", cases("fedentropy"))
def test_fedentropy_weighs_and_skips_clients_as_the_program(case: dict[str, Any]) -> None:
    selector = FedEntropy()
    state = selector.init(population(len(case["samples"])))
    for number, step in enumerate(case["rounds"], 1):
        weights = state.arrays["weights"]
        assert weights / weights.sum() == close(step["shares"])
        skipped = skipped_in(selector, state, step, case["samples"])
        assert sorted(skipped.tolist()) == step["skipped"].tolist()
        state = selector.observe(state, ended_without(number, step["cohort"], skipped))


@pytest.mark.parametrize("case", cases("fedentropy")[0]["pools"])
def test_fedentropy_has_the_pools_of_the_programs_other_variant(case: dict[str, Any]) -> None:
    """In each round, the program draws either among wanted clients or among skipped ones."""
    selector = FedEntropy(grouping="pools")
    state, found = selector.init(population(len(case["samples"]))), set[bool]()
    for number, step in enumerate(case["rounds"], 1):
        wanted = state.arrays["weights"] > 0
        among_wanted = bool(wanted[step["pool"]].all())
        assert step["pool"].tolist() == np.flatnonzero(wanted == among_wanted).tolist()
        found.add(among_wanted)
        skipped = skipped_in(selector, state, step, case["samples"])
        state = selector.observe(state, ended_without(number, step["cohort"], skipped))
    assert len(found) == 2 or len(case["rounds"]) < 6
