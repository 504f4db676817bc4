"""FedPNS against a second implementation, over several rounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.populations import context, facts_of, judged, outcome, population, select

from potluck.common.settings.plugins import create
from potluck.server.selection import Floats, MeasureMean, Selector

Vectors = Mapping[int, Sequence[float]]


def inner(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def mean_of(vectors: Vectors, rows: Sequence[int]) -> list[float]:
    return [sum(column) / len(rows) for column in zip(*(vectors[r] for r in rows), strict=True)]


class PlainFedPNS:
    """FedPNS in plain loops. probabilities, selected, flagged: one number per known client."""

    def __init__(self, clients: int, options: Mapping[str, Any]) -> None:
        self.share, self.check = options.get("share", 0.8), options.get("check", True)
        self.alpha, self.beta = options.get("alpha", 2.0), options.get("beta", 0.7)
        self.probabilities = [1 / clients] * clients
        self.selected, self.flagged = [0] * clients, [0] * clients

    def chances(self, clients: int) -> list[float]:
        """Return all probabilities. New clients have the mean of the others."""
        known = self.probabilities
        found = known + [sum(known) / len(known)] * (clients - len(known))
        return [each / sum(found) for each in found]

    def judge(
        self,
        steps: Vectors,
        loss: Callable[[Sequence[int]], float],
        twin: np.random.Generator,
    ) -> tuple[list[int], list[int]]:
        """Return the flagged and the excluded clients. steps: g of each. loss: of a mean."""

        def together(rows: Sequence[int]) -> float:  # E(S)
            mean = mean_of(steps, rows)
            return sum(inner(steps[row], mean) for row in rows)

        flagged, excluded, kept = list[int](), list[int](), list(steps)
        while len(kept) > max(1, math.ceil(self.share * len(steps))):
            gains = {row: together([r for r in kept if r != row]) for row in kept}
            best = [row for row in kept if gains[row] > max(gains.values()) - 1e-9]
            worst = best[int(twin.integers(len(best)))] if len(best) > 1 else best[0]
            if gains[worst] <= together(kept):
                break
            flagged.append(worst)
            fewer = [row for row in kept if row != worst]
            if self.check and loss(fewer) > loss(kept):
                break
            excluded.append(worst)
            kept = fewer
        return flagged, excluded

    def learn(self, selected: Sequence[int], flagged: Sequence[int]) -> None:
        """Move probability. A client is known once it, or a later row, has been selected."""
        clients = max(len(self.probabilities), *(row + 1 for row in selected))
        self.probabilities = self.chances(clients)
        more = [0] * (clients - len(self.selected))
        self.selected, self.flagged = self.selected + more, self.flagged + more
        for row in selected:
            self.selected[row] += 1
        taken = 0.0
        for row in flagged:
            self.flagged[row] += 1
            rate = self.flagged[row] / self.selected[row]
            lost = self.probabilities[row] * min((rate + self.beta) ** self.alpha, 1.0)
            self.probabilities[row] -= lost
            taken += lost
        others = [row for row in range(clients) if row not in flagged]
        for row in others:
            self.probabilities[row] += taken / len(others)


def plain_draw(chances: Mapping[int, float], size: int, twin: np.random.Generator) -> list[int]:
    """Draw without replacement: the clients whose exponential waiting times, with their chances as
    rates, end first. Clients of chance 0 come last."""
    first, second = twin.exponential(size=(2, len(chances))).tolist()
    waits = {
        row: (first[place] / chance if chance else math.inf, second[place])
        for place, (row, chance) in enumerate(chances.items())
    }
    return sorted(waits, key=lambda row: waits[row])[:size]


def updates_of(generator: np.random.Generator, clients: int, steps: Floats) -> Floats:
    """Return one update per client: a common direction and noise. Those of clients 0 to 2 mostly
    point the other way, and those of clients 4 and 5 are equal per step."""
    found = [1.0, 0.5, 0, 0] + 0.6 * generator.standard_normal((clients, 4))
    found[:3] *= -generator.choice([-0.5, 1, 1], (3, 1))
    found[5] = found[4]
    return found * steps[:, None]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"share": 0.5},
        {"check": False},
        {"check": False, "share": 0.3, "alpha": 0.5, "beta": 0.1},
        {"share": 0.4, "alpha": 3.0, "beta": 0.2},
    ],
)
def test_rounds_agree_with_a_second_implementation(options: dict[str, Any], seed: int) -> None:
    """Some clients are unavailable, some updates fail, and clients 12 and 13 join in round 6. The
    loss of a mean is its distance from a target."""
    generator, selector = np.random.default_rng(seed), create(Selector, "fedpns", options)
    plain, state = PlainFedPNS(12, options), selector.init(population(12))
    flags = refusals = 0
    for number in range(1, 21):
        clients = 14 if number >= 6 else 12
        here = np.flatnonzero(generator.random(clients) < 0.8)
        given = context(population(clients), 7, number=number, seed=seed, available=here)
        selection = select(selector, state, given)
        chances = plain.chances(clients)
        some = {row: chances[row] for row in here.tolist()}
        assert selection.rows.tolist() == plain_draw(some, 7, given.generator("fedpns"))
        reported = [float(reason.split()[2]) for reason in selection.reasons]
        relative = [chances[row] * clients for row in selection.rows.tolist()]
        assert reported == pytest.approx(relative, abs=0.0051)

        steps = generator.integers(1, 6, clients)
        updates = updates_of(generator, clients, steps.astype(np.float64))
        target = generator.standard_normal(4)
        rows = generator.permutation(selection.rows[generator.random(len(selection.rows)) < 0.9])
        facts = facts_of(updates[rows], rows=rows, number=number, seed=seed)
        facts = replace(facts, steps=steps[rows])

        def loss(among: Sequence[int], updates: Floats = updates, to: Floats = target) -> float:
            return math.dist(mean_of(dict(enumerate(updates.tolist())), among), to)

        def measured(wanted: MeasureMean, loss: Callable[..., float] = loss) -> float:
            assert wanted.weights is not None
            assert set(wanted.weights.tolist()) == {1.0}
            return loss(wanted.rows.tolist())

        judgement = judged(selector, state, facts, measured)
        per_step = {row: (updates[row] / steps[row]).tolist() for row in rows.tolist()}
        flagged, excluded = plain.judge(per_step, loss, facts.generator("fedpns"))
        assert list(judgement.set_aside) == excluded
        marked = [row for row in rows.tolist() if row in flagged]
        assert rows[judgement.values["flagged"] > 0].tolist() == marked
        flags, refusals = flags + len(flagged), refusals + (flagged != excluded)

        ended = outcome(number, selection, judgement=judgement)
        left = [row for row in rows.tolist() if row not in excluded]
        ended = replace(ended, facts=facts, included=np.array(left, dtype=np.int64))
        state = selector.observe(state, ended)
        plain.learn(selection.rows.tolist(), flagged)
        assert state.arrays["probability"] == pytest.approx(plain.probabilities, abs=1e-12)
        assert state.arrays["selected"].tolist() == plain.selected
        assert state.arrays["flagged"].tolist() == plain.flagged
    assert flags > 8
    assert (refusals > 2) == options.get("check", True)


def test_literal_rule_flags_all_updates_against_the_mean_as_in_plain_loops() -> None:
    generator, selector = np.random.default_rng(5), create(Selector, "fedpns", {"rule": "literal"})
    flags = 0
    for number in range(1, 21):
        steps = generator.integers(1, 6, 9)
        updates = updates_of(generator, 9, steps.astype(np.float64))
        facts = replace(facts_of(updates, number=number), steps=steps)
        judgement = judged(selector, selector.init(population(9)), facts)
        per_step = dict(enumerate((updates / steps[:, None]).tolist()))
        mean = mean_of(per_step, range(9))
        against = [row for row in range(9) if inner(mean, per_step[row]) < 0]
        assert list(judgement.set_aside) == against
        assert np.flatnonzero(judgement.values["flagged"]).tolist() == against
        flags += len(against)
    assert flags > 20
