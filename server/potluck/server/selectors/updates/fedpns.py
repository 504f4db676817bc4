"""FedPNS: excludes updates that oppose the others, and selects their clients less often.

Wu & Wang, "Node Selection Toward Faster Convergence for Federated Learning on Non-IID Data", 2022.
Details that the paper leaves open follow its authors' program.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, NonNegativeFloat

from potluck.server.selection import (
    Floats,
    Judgement,
    MeasureMean,
    Population,
    RoundOutcome,
    Rows,
    Selection,
    SelectionContext,
    Selector,
    UpdateFact,
    UpdateFacts,
)
from potluck.server.selectors.parts.choosing import Cohort, draw_weighted, largest
from potluck.server.state import State

_FLAGGED: Final = "flagged"
"""Name of the judgement's values: for each update, 1.0 if it was flagged, else 0.0."""

_ROUNDING: Final = 1e-9
"""Tolerance for products that rounding errors may raise above a whole number, such as 0.7 · 10."""


@dataclass(kw_only=True)
class FedPNS(Selector):
    """Draws clients less often if their updates pulled against the other updates.

    rule: which updates are flagged. `expected` flags one update after another, until ⌈share ·
    updates⌉ are left: the update without which E(S) = |S|·‖mean g‖² is largest, if E(S) is larger
    without it; g is an update per step. `literal` flags all updates with ⟨mean g, g_k⟩ < 0, as the
    inequality of the paper reads. A flagged update is excluded from the model.

    check: True to evaluate the mean without the update on the coordinator's data, before `expected`
    excludes it, as in the authors' program. If the loss rises, the update stays, though flagged,
    and no further updates are excluded. Without the check, the method differs from the paper's, and
    the coordinator needs no data.

    A client whose update is flagged loses the share min((flagged/selected + beta)^alpha, 1) of its
    probability, which all others share. Late joiners start with the mean probability. O(K) and one
    pass over the updates, of O(cohort² · parameters).
    """

    alpha: NonNegativeFloat = 2.0
    beta: NonNegativeFloat = 0.7
    share: Annotated[float, Field(ge=0, le=1)] = 0.8
    rule: Literal["expected", "literal"] = "expected"
    check: bool = True

    needs_facts = frozenset({UpdateFact.GRAM})

    def __post_init__(self) -> None:
        self.measures = self.check and self.rule == "expected"

    def init(self, population: Population) -> State:
        """Return the initial state: for each row, its probability, and how often it was selected
        and flagged."""
        return State(arrays=_grown({}, len(population)))

    def select(self, state: State, context: SelectionContext) -> Selection:
        """Return a cohort, drawn without replacement by the probabilities."""
        generator = context.generator("fedpns")
        cohort = Cohort(context, generator)
        probabilities = _grown(state.arrays, len(context.population))["probability"]
        relative = probabilities[context.available] * len(probabilities)
        drawn = draw_weighted(relative, cohort.size, generator)
        reasons = [f"drawn with {factor:.2f} of an equal share" for factor in relative[drawn]]
        cohort.extend(context.available[drawn].tolist(), reasons)
        return cohort.selection()

    def judge(
        self,
        state: State,
        facts: UpdateFacts,
    ) -> Generator[MeasureMean, float, Judgement]:
        """Exclude the updates that the rule flags."""
        gram, flagged = _per_step(facts), np.zeros(len(facts.rows))
        if self.rule == "literal":
            flagged[gram.sum(axis=1) < 0] = 1
            reason = "its update points against the mean of all"
            against = dict.fromkeys(facts.rows[flagged > 0].tolist(), reason)
            return Judgement(set_aside=against, values={_FLAGGED: flagged})
        set_aside: dict[int, str] = {}
        kept, generator = np.arange(len(facts.rows)), facts.generator("fedpns")
        floor = max(1, math.ceil(self.share * len(facts.rows) - _ROUNDING))
        while len(kept) > floor:
            expected, without = leaving_out(gram[np.ix_(kept, kept)])
            worst = largest(without, generator)
            if without[worst] <= expected:
                break
            flagged[kept[worst]] = 1
            fewer = np.delete(kept, worst)
            if self.check:
                before = yield MeasureMean(rows=facts.rows[kept], weights=np.ones(len(kept)))
                after = yield MeasureMean(rows=facts.rows[fewer], weights=np.ones(len(fewer)))
                if after > before:
                    break
            gain = f" {without[worst] / expected:.3g} times" if expected > 0 else ""
            set_aside[int(facts.rows[kept[worst]])] = f"without it the others pull{gain} as far"
            kept = fewer
        return Judgement(set_aside=set_aside, values={_FLAGGED: flagged})

    def observe(self, state: State, outcome: RoundOutcome) -> State:
        """Move probability from the clients whose updates were flagged to all others."""
        arrays = _grown(state.arrays, int(outcome.selected.max(initial=-1)) + 1)
        selected, flagged = arrays["selected"].copy(), arrays["flagged"].copy()
        found = outcome.judgement.values.get(_FLAGGED)
        rows = np.zeros(0, dtype=np.int64)
        if outcome.facts is not None and found is not None:
            rows = np.sort(outcome.facts.rows[found > 0])
        selected[outcome.selected] += 1
        flagged[rows] += 1
        rates = flagged[rows] / np.maximum(selected[rows], 1)
        lost = lost_share(rates, alpha=self.alpha, beta=self.beta)
        return State(
            arrays={
                "probability": moved(arrays["probability"], rows, lost),
                "selected": selected,
                "flagged": flagged,
            }
        )


def leaving_out(gram: Floats) -> tuple[float, Floats]:
    """Return E(S), and E without each update. gram: n × n inner products, n ≥ 2; their sum divided
    by n is E(S)."""
    total, count = float(gram.sum()), len(gram)
    rest: Floats = total - 2 * gram.sum(axis=1) + np.diagonal(gram)
    return total / count, rest / (count - 1)


def lost_share(rates: Floats, *, alpha: float, beta: float) -> Floats:
    """Return the share of its probability that a client loses. rates: flagged/selected of each
    client."""
    with np.errstate(over="ignore"):
        lost: Floats = np.minimum((rates + beta) ** alpha, 1.0)
    return lost


def moved(probabilities: Floats, flagged: Rows, lost: Floats) -> Floats:
    """Return the probabilities after each flagged row has lost a share of its probability to all
    other rows."""
    result = probabilities.copy()
    if not 0 < len(flagged) < len(result):
        return result
    taken = result[flagged] * lost
    others = np.ones(len(result), dtype=bool)
    others[flagged] = False
    result[flagged] -= taken
    result[others] += taken.sum() / others.sum()
    return result


def _per_step(facts: UpdateFacts) -> Floats:
    """Return inner products of updates per step, divided by the largest; 0 if not all are
    finite."""
    with np.errstate(over="ignore", invalid="ignore"):
        gram = facts.gram / np.outer(facts.steps, facts.steps)
        scaled = gram / np.abs(gram).max()
    return scaled if np.isfinite(scaled).all() else np.zeros(gram.shape)


def _grown(arrays: Mapping[str, NDArray[Any]], clients: int) -> dict[str, NDArray[Any]]:
    """Return the arrays, with rows for clients that have joined since the last round. The new rows
    have the mean probability."""
    known = len(arrays.get("probability", ()))
    if known >= clients:
        return dict(arrays)
    joined = clients - known
    before = arrays.get("probability", np.zeros(0)) * (known / clients)
    grown = {"probability": np.append(before, np.full(joined, 1 / clients))}
    for name in ("selected", "flagged"):
        counts = arrays.get(name, np.zeros(0, dtype=np.int64))
        grown[name] = np.append(counts, np.zeros(joined, dtype=np.int64))
    return grown
